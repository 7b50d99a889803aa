"""transformers.Trainer over `datasets`, its defaults: images decoded on the fly by `set_transform`, evaluation and a checkpoint each epoch.

Its default clips gradients to norm 1, which no other contender does: that is off here, so that the work is the same.
"""

import time
from pathlib import Path
from typing import Any

import numpy
import torch.nn.functional as F
from convnet import ConvNet
from datasets import load_dataset
from record import EVAL_BATCH_SIZE, LR, Record, flags
from torch import Tensor
from torchvision.transforms import ToTensor
from transformers import EvalPrediction, Trainer, TrainerCallback, TrainingArguments


class Classifier(ConvNet):
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(pixel_values)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Times(TrainerCallback):
    def __init__(self, record: Record, batch_size: int, images: int) -> None:
        self.record, self.batch_size, self.images, self.left = record, batch_size, images, 0
        self.start = 0.0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.left = self.images
        self.record.train_start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.record.step(min(self.batch_size, self.left))
        self.left -= self.batch_size

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.record.train_end()
        self.start = time.perf_counter()

    def on_evaluate(self, *_: Any, metrics: dict[str, float], **__: Any) -> None:
        self.record.evaluated(100 * metrics["eval_accuracy"], int(metrics["eval_samples"]), time.perf_counter() - self.start)


def compute_metrics(evaluated: EvalPrediction) -> dict[str, float]:
    right = numpy.argmax(evaluated.predictions, axis=-1) == evaluated.label_ids
    return {"accuracy": float(right.mean()), "samples": len(right)}


def main() -> None:
    arguments = flags()
    record = Record(arguments)
    files = {split: str(Path(arguments.data) / f"{split}-*.parquet") for split in ("train", "test")}
    dataset = load_dataset("parquet", data_files=files)
    to_tensor = ToTensor()
    dataset.set_transform(lambda rows: {"pixel_values": [to_tensor(image) for image in rows["image"]], "labels": rows["label"]})
    training = TrainingArguments(
        output_dir=arguments.output_dir,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=EVAL_BATCH_SIZE,
        num_train_epochs=arguments.epochs,
        max_steps=arguments.max_steps or -1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=0.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        remove_unused_columns=False,
        report_to="none",
        seed=arguments.seed,
    )
    trainer = Trainer(
        model=Classifier(),
        args=training,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        compute_metrics=compute_metrics,
        callbacks=[Times(record, arguments.batch_size, len(dataset["train"]))],
    )
    trainer.train()
    trainer.save_model(str(Path(arguments.output_dir) / "model"))
    record.save()


if __name__ == "__main__":
    main()
