"""Hugging Face Accelerate as its documentation shows it: the tutorials' loop with `prepare`, `backward` and `gather_for_metrics`."""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from convnet import ConvNet
from record import EVAL_BATCH_SIZE, LR, Record, flags
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor


def main() -> None:
    arguments = flags()
    record = Record(arguments)
    set_seed(arguments.seed)
    accelerator = Accelerator()
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    train_set = MNIST(arguments.data, train=True, transform=ToTensor())
    test_set = MNIST(arguments.data, train=False, transform=ToTensor())
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=EVAL_BATCH_SIZE)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for _ in range(arguments.epochs):
        model.train()
        record.train_start()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            if last := record.step(len(labels)):
                break
        record.train_end()
        model.eval()
        start, right, count = time.perf_counter(), 0, 0
        for images, labels in test_loader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == references).sum().item()
            count += len(references)
        accelerator.print(f"loss {loss.item():.4f}")
        record.evaluated(100 * right / count, count, time.perf_counter() - start)
        if last:
            break
    accelerator.save_model(model, Path(arguments.output_dir) / "model")
    record.save()


if __name__ == "__main__":
    main()
