"""The second front end: `torch.export` runs forward on fake tensors, and its program becomes a marked graph."""
