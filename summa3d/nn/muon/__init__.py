"""Muon: orthogonalised momentum for hidden matrices, of which ranks hold blocks: whole matrices on owners, and back."""
