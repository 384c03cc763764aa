"""Models: shapes of models, LoRA adapters, routers of experts, image inputs, and a toy model that needs no download."""
