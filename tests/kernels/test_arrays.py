"""Arrays of other libraries are taken as they are, without a copy."""

import numpy as np
import pytest
import torch

from unified_cache.errors import ArgumentError
from unified_cache.pools.arrays import as_tensor


def test_memory_is_shared() -> None:
    tensor = torch.zeros(3)
    assert as_tensor(tensor) is tensor
    array = np.zeros((2, 3), np.float16)
    as_tensor(array)[1, 2] = 5
    assert array[1, 2] == 5


class Cuda:
    """An array on a GPU that there is not."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
            "strides": None,
        }


def test_what_can_not_be_shared() -> None:
    with pytest.raises(ArgumentError, match="list is not an array that can be shared: it has neither"):
        as_tensor([1, 2])
    with pytest.raises(ArgumentError, match="ndarray is not an array that can be shared"):
        as_tensor(np.array(["text"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_an_array_on_a_gpu_goes_to_torch() -> None:
    with pytest.raises(ArgumentError, match="Cuda is not an array that can be shared: "):
        as_tensor(Cuda())
