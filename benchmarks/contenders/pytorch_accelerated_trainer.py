"""pytorch-accelerated as its documentation shows it: its Trainer with the default callbacks, and its default of one data worker a core."""

import time
from pathlib import Path
from typing import Any

import torch
from convnet import ConvNet
from pytorch_accelerated import Trainer
from record import EVAL_BATCH_SIZE, LR, Record, flags
from torch import nn
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor


class RecordedTrainer(Trainer):
    """The Trainer with accuracy. Its `on_train_step_end` comes before backward and update, so a step is counted in a method."""

    def __init__(self, record: Record, **options: Any) -> None:
        super().__init__(**options)
        self.record = record
        self.images = self.right = self.count = 0
        self.start = 0.0

    def train_epoch_start(self) -> None:
        super().train_epoch_start()
        self.record.train_start()

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        self.images = len(batch[1])
        return super().calculate_train_batch_loss(batch)

    def optimizer_zero_grad(self) -> None:
        super().optimizer_zero_grad()
        self.record.step(self.images)

    def train_epoch_end(self) -> None:
        self.record.train_end()

    def eval_epoch_start(self) -> None:
        super().eval_epoch_start()
        self.start, self.right, self.count = time.perf_counter(), 0, 0

    def calculate_eval_batch_loss(self, batch: Any) -> Any:
        output = super().calculate_eval_batch_loss(batch)
        self.right += (output["model_outputs"].argmax(1) == batch[1]).sum().item()
        self.count += len(batch[1])
        return output

    def eval_epoch_end(self) -> None:
        self.record.evaluated(100 * self.right / self.count, self.count, time.perf_counter() - self.start)


def main() -> None:
    arguments = flags()
    record = Record(arguments)
    torch.manual_seed(arguments.seed)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    trainer = RecordedTrainer(record, model=model, loss_func=nn.CrossEntropyLoss(), optimizer=optimizer)
    trainer.train(
        train_dataset=MNIST(arguments.data, train=True, transform=ToTensor()),
        eval_dataset=MNIST(arguments.data, train=False, transform=ToTensor()),
        num_epochs=arguments.epochs,
        per_device_batch_size=arguments.batch_size,
        max_num_train_steps=arguments.max_steps,
        eval_dataloader_kwargs={"batch_size": EVAL_BATCH_SIZE},
    )
    trainer.save_checkpoint(str(Path(arguments.output_dir) / "checkpoint.pt"))
    record.save()


if __name__ == "__main__":
    main()
