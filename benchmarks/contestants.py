"""Ways to fine-tune the same weights on the same folder, each as its documentation has it: see time_to_accuracy.py."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from vit.models.weights import load_weights

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Predict = Callable[[list[Image.Image]], Tensor]


class Points(Protocol):
    """Takes a model's accuracy now, with the clock stopped."""

    def __call__(self, predict: Predict, *, last: bool = False) -> None: ...


def shown(size: int) -> v2.Compose:
    """A picture as it is tested: all of it, at this size."""
    resize = v2.Resize((size, size), interpolation=v2.InterpolationMode.BICUBIC)
    return v2.Compose([resize, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def predicts(logits: Callable[[Tensor], Tensor], size: int) -> Predict:
    """Logits of pictures at a size."""
    show = shown(size)
    return lambda pictures: logits(torch.stack([show(picture.convert("RGB")) for picture in pictures]))


def trainer(folder: Path, weights: str, work: Path, points: Points, *, size: int) -> None:
    """transformers' guide with the defaults of `TrainingArguments`: AdamW, 5e-5, linear to 0, batch 8, 3 epochs."""
    import transformers

    crop = v2.RandomResizedCrop(size, interpolation=v2.InterpolationMode.BICUBIC)
    change = v2.Compose([crop, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    data = ImageFolder(str(folder / "train"), change)
    model = transformers.AutoModelForImageClassification.from_pretrained(
        weights, num_labels=len(data.classes), ignore_mismatched_sizes=True, dtype=torch.float32
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(work), save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        remove_unused_columns=False,
    )  # fmt: skip

    def logits(images: Tensor) -> Tensor:
        model.eval()
        return model(pixel_values=images).logits

    class Ends(transformers.TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            points(predicts(logits, size))

    def together(samples: Iterable[tuple[Tensor, int]]) -> dict[str, Tensor]:
        images, labels = zip(*samples, strict=True)
        return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}

    transformers.Trainer(model, arguments, train_dataset=data, data_collator=together, callbacks=[Ends()]).train()
    points(predicts(logits, size), last=True)


def timm(folder: Path, weights: str, work: Path, points: Points, *, size: int) -> None:
    """The defaults of timm's training script, cut to 20 epochs: SGD, 0.05 at batch 128, cosine after 5 epochs."""
    import timm as library
    from timm.data import create_transform
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2

    epochs, batch = 20, 128
    data = ImageFolder(str(folder / "train"), create_transform(size, is_training=True, mean=MEAN, std=STD))
    name = "vit_small_patch14_dinov2"
    model = library.create_model(name, img_size=size, num_classes=len(data.classes))
    start = load_weights(weights).model.state_dict()
    start["pos_embed"] = library.layers.resample_abs_pos_embed(start["pos_embed"], [size // 14] * 2)
    start = {key: value.float() for key, value in start.items() if not key.startswith("head.")}
    assert model.load_state_dict(start, strict=False).missing_keys == ["head.weight", "head.bias"]
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1 * batch / 256, momentum=0.9, weight_decay=2e-5)
    schedule, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=epochs, warmup_epochs=5, warmup_lr=1e-5)
    criterion = LabelSmoothingCrossEntropy(0.1)

    def logits(images: Tensor) -> Tensor:
        return model.eval()(images)

    for epoch in range(epochs):
        model.train()
        for images, labels in DataLoader(data, batch, shuffle=True, drop_last=True):
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        schedule.step(epoch + 1)
        if epoch % 4 == 3 and epoch + 1 < epochs:
            points(predicts(logits, size))
    points(predicts(logits, size), last=True)


def probe(folder: Path, weights: str, work: Path, points: Points, *, size: int) -> None:
    """Logistic regression (scikit-learn) on the class token of the frozen weights."""
    from sklearn.linear_model import LogisticRegressionCV
    from transformers import AutoModel

    model = AutoModel.from_pretrained(weights, dtype=torch.float32).eval()
    data = ImageFolder(str(folder / "train"), shown(size))

    def features(images: Tensor) -> Tensor:
        return model(pixel_values=images).last_hidden_state[:, 0]

    with torch.inference_mode():
        x = torch.cat([features(images) for images, _ in DataLoader(data, 50)])
    head = LogisticRegressionCV(
        Cs=[10.0**k for k in range(-5, 2)],
        max_iter=2000,
        scoring="accuracy",
        l1_ratios=(0,),
        use_legacy_attributes=False,
    )
    head.fit(x.numpy(), data.targets)
    linear = nn.Linear(x.shape[1], len(data.classes))
    linear.weight.data = torch.as_tensor(head.coef_, dtype=torch.float32)
    linear.bias.data = torch.as_tensor(head.intercept_, dtype=torch.float32)
    points(predicts(lambda images: linear(features(images)), size), last=True)
