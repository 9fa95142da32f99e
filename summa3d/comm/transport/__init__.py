"""How bytes travel: one module for each way, and the rule that selects among them."""
