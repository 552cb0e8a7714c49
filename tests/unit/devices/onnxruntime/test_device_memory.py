"""Reserving and reading through graphs: on the processor's provider, which takes the same ones."""

import numpy as np
import onnxruntime as ort
import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.device_memory import DeviceMemory
from mirrorsd.devices.onnxruntime.stage import Place

ON_HOST = DeviceMemory(TargetPlacement(), "cpu")


@pytest.mark.parametrize("shape", [(3,), (1, 2), (1, 2, 300, 16)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int32"])
def test_what_is_reserved_is_zero_and_has_its_shape(shape: tuple[int, ...], dtype: str) -> None:
    value = ON_HOST.zeros(shape, dtype)
    assert (tuple(value.shape()), value.numpy().dtype) == (shape, np.dtype(dtype))
    assert not value.numpy().any()


def test_what_is_read_is_a_copy_of_what_is_there() -> None:
    array = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    np.testing.assert_array_equal(ON_HOST.read(ort.OrtValue.ortvalue_from_numpy(array)), array)


def test_rows_of_such_memory_are_tensors_of_their_own_and_messages_stay_on_the_host() -> None:
    place = Place(kind="cpu", is_device=True, graphs=ON_HOST)
    whole = place.tensor((1, 32, 5), "float32")
    rows = place.first_rows(whole, 3, None, "logits")  # type: ignore[arg-type]
    assert (whole.host, rows.host, rows.read().shape) == (None, None, (1, 3, 5))
    message = place.message((1, 4), "int64")
    message.write(np.array([[1, 2, 3, 4]]))
    assert message.read().tolist() == [[1, 2, 3, 4]]
