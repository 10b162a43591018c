"""What all tests share: two threads for torch, no deadlines, no request to the Hugging Face hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import torch

# A busy machine makes single examples slow; that is no failure.
hypothesis.settings.register_profile("ragen-apo", deadline=None)
hypothesis.settings.load_profile("ragen-apo")
torch.set_num_threads(2)
