"""The two tutorials' ConvNet."""

from torch import Tensor, nn


class ConvNet(nn.Module):
    """2 x (conv 5x5, padding 2 -> BatchNorm -> ReLU -> max pool 2), 16 and 32 channels, then one linear layer.

    For MNIST (1 x 28 x 28, 10 classes) it is the tutorials' network: a linear layer of 32 x 7 x 7 = 1568 -> 10, 29,034 parameters.

    Args:
        in_channels: C of the images.
        size: (height, width) of the images, pixels, each at least 4.
        num_classes: outputs.
    """

    def __init__(self, in_channels: int = 1, size: tuple[int, int] = (28, 28), num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(in_channels, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(32 * (size[0] // 4) * (size[1] // 4), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) float -> logits (B, num_classes)."""
        features: Tensor = self.layer2(self.layer1(images))
        logits: Tensor = self.fc(features.flatten(1))
        return logits
