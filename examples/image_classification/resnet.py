"""ResNet-18, -50 and -101 in plain PyTorch. Runs in the worker process.

The modules have torchvision's names and shapes, so its weight files load with `load_state_dict`.
Source: He et al., "Deep Residual Learning for Image Recognition" (2015), with the stride of a
bottleneck in its 3x3 convolution, as torchvision has it.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

# What ImageNet has, and so the published weights.
CLASSES = 1000
# Statistics of ImageNet's channels, by which an input is normalised. Source: torchvision's presets.
MEAN = (0.485, 0.456, 0.406)
STANDARD_DEVIATION = (0.229, 0.224, 0.225)
# Of random weights, so that all workers answer alike.
SEED = 0


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, as in ResNet-18."""

    expansion = 1

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(channels_in, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels_in, h, w) to (n, width, h / stride, w / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += shortcut
        return self.relu(x)  # type: ignore[no-any-return]  # a module's call is untyped


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones and a shortcut, as in ResNet-50 and deeper."""

    expansion = 4

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels_in, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels_in, h, w) to (n, 4 * width, h / stride, w / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)  # type: ignore[no-any-return]  # as above


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Sequential | None:
    """Projection of the input to the output's shape; None if the shapes are equal."""
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class ResNet(nn.Module):
    """Images of shape (n, 3, h, w) to one score per class, (n, classes), before the softmax.

    Args:
        block: What it is made of.
        blocks: How many of them in each of the four stages.
        classes: Of the last layer.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images to scores."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]  # as above


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    channels_in: int,
    width: int,
    blocks: int,
    stride: int,
) -> nn.Sequential:
    """Blocks in a row; the first one changes size and channels."""
    first = block(channels_in, width, stride)
    rest = [block(width * block.expansion, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)


ARCHITECTURES: dict[str, Callable[..., ResNet]] = {
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
}


def load_network(arch: str, weights: str | None) -> ResNet:
    """A network ready to infer, with random weights and a notice if there is no file.

    The number of classes is the file's. Channels come last in memory, in which form convolutions
    cost 5 % less CPU for one image and 20 to 25 % less for 16 (float32, two cores with AVX2), and
    a GPU's matrix units take bfloat16 as it is.
    """
    if weights is None:
        print(f"{arch}: no weights given: random ones, answers are meaningless", file=sys.stderr)
        torch.manual_seed(SEED)
        network = ARCHITECTURES[arch]()
    else:
        state = torch.load(weights, map_location="cpu", weights_only=True)
        network = ARCHITECTURES[arch](classes=len(state["fc.weight"]))
        network.load_state_dict(state)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in its types
    return network.eval().requires_grad_(False)


@torch.inference_mode()
def classify(network: ResNet, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest score and its class, for each image of a batch; on the CPU."""
    # The softmax of 1000 classes needs more digits than bfloat16 has.
    scores, classes = network(batch).float().softmax(1).max(1)
    return scores.cpu(), classes.cpu()
