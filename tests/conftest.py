"""Every test runs on one intra-op thread, so that its numbers do not depend on the machine's size."""

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")
