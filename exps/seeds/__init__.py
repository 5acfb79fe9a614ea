"""The models of the torchgpipe paper, and what its tables ask of them: parameters, bytes between stages, memory, time."""
