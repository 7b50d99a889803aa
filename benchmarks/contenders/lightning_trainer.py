"""PyTorch Lightning as its documentation shows it: a LightningModule, `fit` with its defaults (logger, progress bar, checkpoints)."""

import time
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from convnet import ConvNet
from record import EVAL_BATCH_SIZE, LR, Record, flags
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor


class LitConvNet(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = ConvNet()
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        self.accuracy(self.model(images), labels)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


class Times(lightning.Callback):
    def __init__(self, record: Record) -> None:
        self.record, self.start = record, 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.record.train_start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.record.step(len(batch[1]))

    def on_validation_start(self, *_: Any) -> None:
        self.record.train_end()
        self.start = time.perf_counter()

    def on_validation_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            accuracy = 100 * float(trainer.callback_metrics["val_accuracy"])
            self.record.evaluated(accuracy, len(trainer.val_dataloaders.dataset), time.perf_counter() - self.start)


def main() -> None:
    arguments = flags()
    record = Record(arguments)
    lightning.seed_everything(arguments.seed)
    train_set = MNIST(arguments.data, train=True, transform=ToTensor())
    test_set = MNIST(arguments.data, train=False, transform=ToTensor())
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=EVAL_BATCH_SIZE)
    trainer = lightning.Trainer(
        max_epochs=1 if arguments.max_steps else arguments.epochs,
        limit_train_batches=arguments.max_steps,
        default_root_dir=arguments.output_dir,
        callbacks=[Times(record)],
    )
    trainer.fit(LitConvNet(), train_loader, test_loader)
    record.save()


if __name__ == "__main__":
    main()
