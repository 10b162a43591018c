"""The mathematics is checked in float64 on one thread, so that tolerances can be tight."""

import pytest
import torch


@pytest.fixture(autouse=True)
def float64_on_one_thread():
    num_threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(num_threads)
