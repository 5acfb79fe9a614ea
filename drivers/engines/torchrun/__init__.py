"""Workers as processes that torchrun has started: how they meet, join and leave."""
