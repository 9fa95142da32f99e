# Transformer layers, each written once for every tensor-parallel scheme. May import comm, layout, gemm, autograd; needs torch.
# Next: scheme.py (the layouts), linear.py (the product), block.py, gpt.py.
from .bert import BERT
from .block import Block
from .config import ModelConfig
from .dropout import Batch, Dropout
from .embedding import Embedding, Positions
from .gpt import GPT
from .linear import Linear
from .llama import Llama
from .loss import cross_entropy
from .mlp import MLP, GatedMLP
from .model import build
from .norm import LayerNorm, RMSNorm
from .parameter import ShardedParameter, initialise
from .scheme import Scheme, scheme
from .vit import ViT

__all__ = [
    "BERT",
    "GPT",
    "MLP",
    "Batch",
    "Block",
    "Dropout",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "Llama",
    "ModelConfig",
    "Positions",
    "RMSNorm",
    "Scheme",
    "ShardedParameter",
    "ViT",
    "build",
    "cross_entropy",
    "initialise",
    "scheme",
]
