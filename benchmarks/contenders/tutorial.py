"""The DDP tutorials' own loop: torchvision's MNIST, ToTensor, a DataLoader, `loss.item()` printed every 100 steps.

Started by torchrun it is their DistributedDataParallel form, on gloo, with torchrun's own default of one thread a process. Without
SyncBatchNorm: PyTorch's refuses to run on a CPU. Rank 0 evaluates and saves.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from convnet import ConvNet
from record import EVAL_BATCH_SIZE, LR, Record, flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor


def evaluate(model: nn.Module, loader: DataLoader, record: Record) -> None:
    model.eval()
    start, correct, total = time.perf_counter(), 0, 0
    with torch.no_grad():
        for images, labels in loader:
            predicted = model(images).argmax(1)
            total += labels.size(0)
            correct += (predicted == labels).sum().item()
    record.evaluated(100 * correct / total, total, time.perf_counter() - start)


def main() -> None:
    arguments = flags()
    record = Record(arguments)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(arguments.seed)
    model = ConvNet()
    plain = model
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    train_set = MNIST(arguments.data, train=True, transform=ToTensor())
    test_set = MNIST(arguments.data, train=False, transform=ToTensor())
    sampler = DistributedSampler(train_set) if world_size > 1 else None
    train_loader = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=sampler is None, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=EVAL_BATCH_SIZE)
    for epoch in range(arguments.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        record.train_start()
        for i, (images, labels) in enumerate(train_loader):
            outputs = model(images)
            loss = criterion(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (i + 1) % 100 == 0 and rank == 0:
                print(f"Epoch [{epoch + 1}/{arguments.epochs}], Step [{i + 1}/{len(train_loader)}], Loss: {loss.item():.4f}")
            if last := record.step(len(labels) * world_size):
                break
        record.train_end()
        if rank == 0:
            evaluate(plain, test_loader, record)
        if last:
            break
    if rank == 0:
        torch.save(plain.state_dict(), Path(arguments.output_dir) / "model.pt")
        record.save()
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
