"""The GPU path on real hardware: what needs one GPU and no peer. Skipped, with the driver's own reason, elsewhere.

The simulated driver (tests/fake) has proved order; here the driver, NVRTC and the cards themselves are asked.
"""

from __future__ import annotations

import cuda_files
import pytest
from shardwright import _engine


@pytest.fixture(scope="module")
def devices() -> list[dict]:
    try:
        return _engine.cuda_devices()["devices"]
    except NotImplementedError as error:
        pytest.skip(str(error))


def test_torch_and_the_engine_see_the_same_gpus(devices: list[dict]) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    assert len(devices) == torch.cuda.device_count()
    for ordinal, device in enumerate(devices):
        assert device["capability"] == torch.cuda.get_device_capability(ordinal)
        assert device["name"] == torch.cuda.get_device_name(ordinal)


def test_the_kernels_compile_for_each_gpu(devices: list[dict]) -> None:
    libraries = cuda_files.nvrtc_libraries()
    if not libraries:
        pytest.skip("no libnvrtc on this machine")
    for device in devices:
        major, minor = device["capability"]
        library, builtins = libraries[0]
        _, image = _engine.device_kernel_image(major, minor, nvrtc=str(library), builtins=str(builtins))
        assert image
