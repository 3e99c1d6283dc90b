"""Fine-tuning: data, losses, optimizers, and the trainer that puts them together."""
