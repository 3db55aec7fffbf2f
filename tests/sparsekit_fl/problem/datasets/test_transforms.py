import pytest
import torch
import torch.nn.functional as F

from sparsekit.errors import DataError
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets.base import DataSource, ImageTransform


def images(channels: int, side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, channels, side, side), generator=generator, dtype=torch.uint8)


def test_pixels_are_scaled_and_normalised_per_channel() -> None:
    black_and_white = torch.tensor([[[[0]], [[255]]]], dtype=torch.uint8)
    out = ImageTransform(2, (1, 1), (0.5, 0.0), (0.5, 2.0))(black_and_white)
    assert out.flatten().tolist() == [-1.0, 0.5]


def test_a_nearly_fitting_grey_image_is_padded_with_black_and_repeated() -> None:
    raw = images(1, 28)
    out = ImageTransform(3, (32, 32), (0.25,), (0.5,))(raw)
    assert out.shape == (2, 3, 32, 32)
    assert torch.equal(out[:, 0], out[:, 2])
    assert torch.allclose(out[:, :1, 2:30, 2:30], (raw / 255 - 0.25) / 0.5)
    assert torch.equal(out[:, 0, :2], torch.full((2, 2, 32), -0.5))


def test_a_small_image_is_resized_bilinearly() -> None:
    raw = images(1, 8)
    out = ImageTransform(1, (28, 28), (0.0,), (1.0,))(raw)
    assert torch.allclose(out, F.interpolate(raw / 255, size=(28, 28), mode="bilinear", align_corners=False))


def test_no_pixel_is_skipped_where_one_side_alone_shrinks() -> None:
    stripes = torch.tensor([255, 0], dtype=torch.uint8).repeat(32).expand(1, 1, 16, 64)
    out = ImageTransform(1, (16, 16), (0.0,), (1.0,))(stripes)
    assert out.sub(0.5).abs().max() < 0.1


@pytest.mark.parametrize(
    ("dtype", "label", "message"),
    [
        (torch.int16, 0, r"must be uint8 \(rows, C, H, W\), got torch.int16"),
        (torch.uint8, 2, "label 2"),
        (torch.uint8, -1, "label -1"),
    ],
)
def test_pictures_of_a_source_are_bytes_with_a_class_each(dtype: torch.dtype, label: int, message: str) -> None:
    pool = TensorData((torch.zeros(2, 1, 4, 4, dtype=dtype),), torch.tensor([1, label]))
    with pytest.raises(DataError, match=message):
        DataSource(name="own", kind="image", train=pool, test=pool, classes=2, mean=(0.5,), std=(0.5,))
