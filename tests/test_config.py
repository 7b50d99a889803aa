"""Flags and recipes: one set of rules, one sentence for each mistake."""

import random
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from trainer.config import RANGES, RECIPES, SECTIONS, Config, parse
from trainer.data.loaders import DEFAULT_BATCH_SIZE
from trainer.runtime import UserError

DEFAULTS = Config()
OPTIONS = [pytest.param(field, id=field.name) for field in fields(Config)]


def changed(*argv: str) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    config = parse(argv)
    return {field.name: getattr(config, field.name) for field in fields(Config) if getattr(config, field.name) != field.default}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", {}),
        ("--epochs 5", {"epochs": 5}),
        ("--epochs=5", {"epochs": 5}),
        ("-e 5 -b 8", {"epochs": 5, "batch_size": 8}),
        ("-e=5", {"epochs": 5}),
        ("--batch-size 8 --lr-scheduler=linear", {"batch_size": 8, "lr_scheduler": "linear"}),
        ("--epochs 2 --epochs 5", {"epochs": 5}),
        ("--lr 1e-4", {"lr": 1e-4}),
        ("--lr 2", {"lr": 2.0}),
        ("--tf32", {"tf32": True}),
        ("--tf32 --epochs 4", {"tf32": True, "epochs": 4}),
        ("--epochs 4 --static-graph", {"static_graph": True, "epochs": 4}),
        ("--tf32 true", {"tf32": True}),
        ("--tf32 False", {}),
        ("--broadcast_buffers=false", {"broadcast_buffers": False}),
        ("--broadcast-buffers no", {"broadcast_buffers": False}),
        ("--max_grad_norm null", {}),
        ("--max_grad_norm 1 --max_grad_norm null", {}),
        ("--mixed_precision no", {"mixed_precision": "no"}),
        ("--sync_bn on", {"sync_bn": "on"}),
        ("--seed 9223372036854775807", {"seed": 2**63 - 1}),
        ("--dataset 123", {"dataset": "123"}),
        ("--dataset null", {"dataset": "null"}),
        ("--dataset /data/a=b", {"dataset": "/data/a=b"}),
        ("--dataset=/data/a=b-c", {"dataset": "/data/a=b-c"}),
        ("--output_dir 2024-01-01", {"output_dir": "2024-01-01"}),
        ("--local-rank=1", {}),
        ("--epochs 2 --local_rank 1", {"epochs": 2}),
        ("--local-rank=0 --epochs 2", {"epochs": 2}),
        ("--global_batch_size 64 --batch_size 16", {"global_batch_size": 64, "batch_size": 16}),
        ("--data_dir pets --val_fraction 0.2", {"data_dir": "pets", "val_fraction": 0.2}),
        ("--channels 1", {"channels": "1"}),
        ("--image-size 48x64 --random-erasing 0.25", {"image_size": "48x64", "random_erasing": 0.25}),
    ],
)
def test_flags(argv: str, expected: dict[str, Any]) -> None:
    assert changed(*argv.split()) == expected


def test_types_are_those_of_the_fields() -> None:
    config = parse(["--lr", "1", "--max_grad_norm", "2", "--batch_size", "3"])
    assert [type(value) for value in (config.lr, config.max_grad_norm, config.batch_size)] == [float, float, int]


@pytest.mark.parametrize(
    ("recipe", "flags", "expected"),
    [
        ("lr: 0.1\nepochs: 7\n", "", {"lr": 0.1, "epochs": 7}),
        ("lr: 0.1\nepochs: 7\n", "--lr 0.2", {"lr": 0.2, "epochs": 7}),
        ("tf32: true\nmax_grad_norm: 1\n", "--tf32 false --max_grad_norm null", {}),
        ("lr: 0.1\n", f"--lr {DEFAULTS.lr}", {}),
        ("batch_size: 8\n", "--global_batch_size 64", {"global_batch_size": 64}),
        ("global_batch_size: 64\n", "--batch_size 8", {"batch_size": 8}),
        ("global_batch_size: 64\n", "--batch_size 8 --scale_lr linear", {"batch_size": 8, "scale_lr": "linear"}),
        ("global_batch_size: 64\nbatch_size: 8\n", "", {"global_batch_size": 64, "batch_size": 8}),
        ("data_dir: pets\n", "", {"data_dir": "pets"}),
        ("data_dir: pets\nval_fraction: 0.1\n", "--dataset mnist", {"dataset": "mnist", "val_fraction": 0.1}),
        ("dataset: mnist\n", "--data_dir pets", {"data_dir": "pets"}),
        ("data_dir: pets\n", "--dataset mnist5k", {}),
        ("image_size: 64\nchannels: 3\n", "", {"image_size": "64", "channels": "3"}),
        # YAML 1.1 would read these as true, a text, no value, false, an octal number and a date.
        ("sync_bn: on\n", "", {"sync_bn": "on"}),
        ("lr: 1e-4\n", "", {"lr": 1e-4}),
        ("mixed_precision: null\nmax_grad_norm: ~\nmax_steps:\n", "", {}),
        ("mixed_precision: no\n", "", {"mixed_precision": "no"}),
        ("dataset: 007\n", "", {"dataset": "007"}),
        ("output_dir: 2024-01-01\n", "", {"output_dir": "2024-01-01"}),
        ("tf32: yes\nbroadcast_buffers: off\n", "", {"tf32": True, "broadcast_buffers": False}),
        ("# a comment\nseed: 5 # another\n\ndataset: 'a: b'\n", "", {"seed": 5, "dataset": "a: b"}),
    ],
)
@pytest.mark.parametrize("first", ["recipe", "flags"])
def test_recipe_beats_default_and_flag_beats_recipe(recipe: str, flags: str, expected: dict[str, Any], first: str) -> None:
    Path("recipe.yaml").write_text(recipe)
    parts = [["--config", "recipe.yaml"], flags.split()]
    one, two = parts if first == "recipe" else parts[::-1]
    assert changed(*one, *two) == expected


def test_the_later_recipe_wins() -> None:
    Path("one.yaml").write_text("lr: 0.1\nepochs: 7\n")
    Path("two.yaml").write_text("lr: 0.2\n")
    assert changed("--config", "one.yaml", "--config=two.yaml") == {"lr": 0.2, "epochs": 7}


@pytest.mark.parametrize("name", ["mnist", "mnist.yaml", "recipes/mnist"])
def test_own_recipes_have_names_but_a_file_comes_first(name: str) -> None:
    assert parse(["--config", name]).dataset == "mnist"
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("epochs: 99\n")
    assert changed("--config", name) == {"epochs": 99}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: str(path.stem))
def test_shipped_recipes_parse(path: Path) -> None:
    config = parse(["--config", str(path)])
    assert config == parse(["--config", path.stem])
    assert path.read_text().startswith("#"), "a recipe is headed by what it is and its command"
    listed = yaml.load(path.read_text(), yaml.BaseLoader)
    assert {key: getattr(config, key) for key in listed} == {key: getattr(parse([f"--{key}={listed[key]}"]), key) for key in listed}


def test_the_default_recipe_lists_the_defaults() -> None:
    assert changed("--config", "mnist5k") == {"batch_size": DEFAULT_BATCH_SIZE}


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--epochs", "4", "--help"]])
def test_help_comes_from_the_main_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as raised:
            parse(words)
        assert raised.value.code == 0
        assert ("--epochs" in capsys.readouterr().out) is printed


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse(["--help"])
    return capsys.readouterr().out


UNITS = (
    "images",
    "epochs",
    "updates",
    "passes",
    "threads",
    "processes",
    "learning rate",
    "0..1",
    "alpha",
    "L2 norm",
    "the optimizer",
    "number that",
    "columns",
    "seconds",
)


@pytest.mark.parametrize("field", OPTIONS)
def test_help_says_what_each_option_is(help_text: str, field: Any) -> None:
    found = re.findall(
        rf"^  --{field.name} [^\n]*?(?:\s{{2,}}|\n\s+)(\S[^\n]*) \(type: ([^\n]*), default: ([^\n]*)\)$", help_text, re.MULTILINE
    )
    assert len(found) == 1
    text, kind, default = found[0]
    assert default == ("null" if field.default is None else str(field.default))
    assert len(text.split()) >= 3, "an option needs a text"
    hint = get_type_hints(Config)[field.name]
    choices = [word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str)]
    assert all(word in kind for word in choices)
    if field.default is None:
        assert "unset" in text, "what happens without it"
    if {int, float} & {hint, *get_args(hint)}:
        assert any(unit in text for unit in UNITS), "the unit of a number"


def test_help_is_in_sections(help_text: str) -> None:
    titles = [f"{section.__doc__}:" for section in SECTIONS]
    assert [line for line in help_text.splitlines() if line in titles] == titles
    assert all(name in help_text for name in (path.stem for path in RECIPES.glob("*.yaml")))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--epochz 3", "unknown flag --epochz: did you mean --epochs?"),
        ("--batchsize 3", "unknown flag --batchsize: did you mean --batch_size?"),
        ("--epoch 3", "unknown flag --epoch: did you mean --epochs?"),
        ("--confg mnist", "unknown flag --confg: did you mean --config?"),
        ("--bogus-flag 3", "unknown flag --bogus_flag: see --help"),
        ("-x", "unknown flag -x: see --help"),
        ("stray", "unexpected word 'stray': every setting is a flag, see --help"),
        ("--epochs 3 stray", "unexpected word 'stray': every setting is a flag, see --help"),
        ("--gpu 0,1", "--gpu is not a flag of the trainer: choose GPUs with `accelerate launch --gpu_ids 0,1 trainer/main.py`"),
        ("--gpu=0", "--gpu is not a flag of the trainer: choose GPUs with `accelerate launch --gpu_ids 0,1 trainer/main.py`"),
        ("--epochs", "--epochs needs a value: a whole number"),
        ("-b --epochs 3", "--batch_size needs a value: a whole number"),
        ("--optimizer", "--optimizer needs a value: one of sgd, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta"),
        ("--config", "--config needs a value: a recipe"),
        ("--config --epochs 3", "--config needs a value: a recipe"),
        ("--lr=", "--lr must be a number, but is ''"),
        ("--lr abc", "--lr must be a number, but is 'abc'"),
        ("--max_grad_norm abc", "--max_grad_norm must be a number, but is 'abc'"),
        ("--epochs 1.5", "--epochs must be a whole number, but is '1.5'"),
        ("--epochs null", "--epochs must be a whole number, but is 'None'"),
        ("--batch_size 8.5", "--batch_size must be a whole number, but is '8.5'"),
        ("--tf32 maybe", "--tf32 must be true or false, but is 'maybe'"),
        ("--checkpointing_steps often", "--checkpointing_steps must be a whole number or epoch, but is 'often'"),
        ("--optimizer SGD", "--optimizer must be one of sgd, adam, adamw, nadam, radam, adamax, rmsprop, adagrad, adadelta, but is 'SGD'"),
        ("--sync_bn true", "--sync_bn must be one of auto, on, off, but is 'true'"),
        ("--mixed_precision fp32", "--mixed_precision must be one of no, fp16, bf16, fp8, but is 'fp32'"),
        ("--mixed_precision NO", "--mixed_precision must be one of no, fp16, bf16, fp8, but is 'NO'"),
        ("--epochs 0", "--epochs must be at least 1, but is 0"),
        ("--epochs -3", "--epochs must be at least 1, but is -3"),
        ("--lr -1", "--lr must be at least 0, but is -1.0"),
        ("--lr 0", "--lr must be above 0, but is 0"),
        ("--max_grad_norm 0", "--max_grad_norm must be above 0, but is 0"),
        ("--momentum 1.1", "--momentum must be between 0 and 1, but is 1.1"),
        ("--lr_gamma 0", "--lr_gamma must be above 0, but is 0"),
        ("--label_smoothing 1.5", "--label_smoothing must be between 0 and 1, but is 1.5"),
        ("--nesterov", "--nesterov needs --optimizer sgd and a --momentum above 0: change them, or leave it out"),
        (
            "--nesterov --optimizer sgd --momentum 0",
            "--nesterov needs --optimizer sgd and a --momentum above 0: change them, or leave it out",
        ),
        ("--min_lr 0.1 --lr 0.01", "--min_lr 0.1 is above --lr 0.01, from which the rate falls: lower it"),
        ("--num_workers -1", "--num_workers must be at least 0, but is -1"),
        ("--seed -1", "--seed must be between 0 and 9223372036854775807, but is -1"),
        ("--seed 9223372036854775808", "--seed must be between 0 and 9223372036854775807, but is 9223372036854775808"),
        ("--config nowhere.yaml", "--config: there is no file nowhere.yaml, and the trainer's own recipes are "),
        ("--config /tmp", "--config: there is no file /tmp, and the trainer's own recipes are "),
        ("--data_dir pets --dataset mnist5k", "--data_dir pets contradicts --dataset mnist5k: leave one of them out"),
        ("--data_dir pets --image_column x", "--image_column contradicts --data_dir, whose classes are folders: leave one of them out"),
        ("--val_fraction 1.5", "--val_fraction must be between 0 and 1, but is 1.5"),
        ("--val_fraction 0", "--val_fraction must be above 0 and below 1, but is 0"),
        ("--val_fraction 0.1 --eval_split dev", "--val_fraction 0.1 contradicts --eval_split dev: leave one of them out"),
        ("--image_size large", "--image_size must be N or HEIGHTxWIDTH, of 4 to 16384 pixels, but is 'large'"),
        ("--image_size 8x8x3", "--image_size must be N or HEIGHTxWIDTH, of 4 to 16384 pixels, but is '8x8x3'"),
        ("--image_size 3x64", "--image_size must be N or HEIGHTxWIDTH, of 4 to 16384 pixels, but is '3x64'"),
        ("--channels RGB", "--channels must be one of auto, 1, 3, but is 'RGB'"),
        ("--on_bad_image ignore", "--on_bad_image must be one of error, skip, but is 'ignore'"),
        ("--augment autoaugment", "--augment must be one of none, light, trivialaugment, randaugment, but is 'autoaugment'"),
        ("--scale_lr linear --global_batch_size 64", "--scale_lr linear contradicts --global_batch_size, which keeps the batch, "),
        ("--scale_lr sqrt --auto_batch_size", "--scale_lr sqrt contradicts --auto_batch_size, which may add accumulation to keep the "),
    ],
)
def test_flags_refused(argv: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(argv.split())
    assert "\n" not in str(raised.value)
    assert str(raised.value) == message or (message.endswith(" ") and str(raised.value).startswith(message))


@pytest.mark.parametrize("name", [name for name, hint in get_type_hints(Config).items() if float in (hint, *get_args(hint))])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", ".nan", ".inf", "-.inf", "1e400"])
def test_numbers_are_finite(name: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"^--{name} (must|needs)"):
        parse([f"--{name}={value}"])
    number: Any = float(value.replace(".", ""))
    with pytest.raises(UserError, match=rf"^--{name} must"):
        Config(**{name: number})


@pytest.mark.parametrize("name", ["dataset", "data_dir", "eval_split", "label_column", "output_dir"])
def test_an_empty_text_is_refused(name: str) -> None:
    """As `--output_dir "$OUT"` gives it where the variable is not set: the run would go into the working directory."""
    with pytest.raises(UserError, match=f"^--{name} must not be empty"):
        parse([f"--{name}", ""])


@pytest.mark.parametrize("name", [name for name, hint in get_type_hints(Config).items() if {int, float} & {hint, *get_args(hint)}])
def test_every_number_has_a_range_that_its_default_is_in(name: str) -> None:
    low, high = RANGES[name]
    below: Any = low - 1
    default = getattr(DEFAULTS, name)
    assert default is None or isinstance(default, str) or low <= default <= high
    with pytest.raises(UserError, match=f"^--{name} must be "):
        Config(**{name: below})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("lrr: 3\n", "the recipe bad.yaml has an unknown key 'lrr': did you mean lr?"),
        ("batch-size: 4\n", "the recipe bad.yaml has an unknown key 'batch-size': did you mean batch_size?"),
        ("bogus: 3\n", "the recipe bad.yaml has an unknown key 'bogus': see --help"),
        ("3: 4\n", "the recipe bad.yaml has an unknown key '3': see --help"),
        ("lr: [1, 2]\n", "the recipe bad.yaml: lr must be one value"),
        ("lr:\n  a: 1\n", "the recipe bad.yaml: lr must be one value"),
        ("lr: abc\n", "--lr must be a number, but is 'abc'"),
        ("epochs: -2\n", "--epochs must be at least 1, but is -2"),
        ("tf32:\n", "--tf32 must be true or false, but is 'None'"),
        ("lr: !!python/object:os.system x\n", "--lr must be a number, but is 'x'"),
        ("- lr\n", "the recipe bad.yaml must be lines of 'key: value', as in "),
        ("hello\n", "the recipe bad.yaml must be lines of 'key: value', as in "),
        ("", "the recipe bad.yaml must be lines of 'key: value', as in "),
        ("lr: *x\n", "the recipe bad.yaml cannot be read: "),
        ("a: b: c\n", "the recipe bad.yaml cannot be read: "),
        ("lr: 1\n---\nlr: 2\n", "the recipe bad.yaml cannot be read: "),
        (b"\x89PNG\r\n\x1a\n\0\0", "the recipe bad.yaml cannot be read: "),
        (b"lr: 0\x00.1\n", "the recipe bad.yaml cannot be read: "),
    ],
)
def test_recipes_refused(content: str | bytes, message: str) -> None:
    Path("bad.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as raised:
        parse(["--config", "bad.yaml"])
    text = str(raised.value)
    assert "\n" not in text
    assert text == message or (message.endswith(" ") and text.startswith(message))
    for path in re.findall(r"as in (\S+)", text):
        assert Path(path).is_file(), "the example that the message points at"


def a_config(generator: random.Random) -> Config:
    """A valid config with about half of its fields drawn at random."""
    texts = [
        "007",
        "null",
        "on",
        "1e3",
        "a: b",
        "x # y",
        "~/x",
        "true",
        "'q'",
        '"d"',
        "[1]",
        "{a: 1}",
        "2024-01-01",
        "-",
        "é ü",
        " x",
        "*a",
        "!t",
        "%",
    ]
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(Config).items():
        if generator.random() < 0.5:
            continue
        low, high = RANGES.get(name, (0, 0))
        choices = [word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str)]
        kinds = {hint, *get_args(hint)}
        if name == "max_time":
            values[name] = generator.choice(["90", "1:00:00", "02:30"])
        elif name == "image_size":
            values[name] = generator.choice(["64", "4", "96x128"])
        elif name == "report_to":
            values[name] = generator.choice(["none", "wandb", "tensorboard, mlflow"])
        elif name == "tracker_project_name":
            values[name] = generator.choice(["a project", "null!", "0", None])
        elif name == "val_fraction":
            values[name] = generator.uniform(0.1, 0.9)
        elif choices:
            values[name] = generator.choice([*choices, 7] if int in kinds else choices)
        elif bool in kinds:
            values[name] = generator.random() < 0.5
        elif float in kinds:
            values[name] = (
                generator.uniform(0.1, 0.9) if high == 1 else generator.choice([1, 1 / 3, 0.1]) * 10.0 ** generator.randint(-30, 30)
            )
        elif int in kinds:
            values[name] = int(low) + generator.randint(0, 10 ** generator.randint(1, 18))
        else:
            values[name] = generator.choice(texts)
    if "data_dir" in values:
        values = {
            name: value for name, value in values.items() if name not in ("dataset", "dataset_config", "image_column", "label_column")
        }
    if "val_fraction" in values:
        values.pop("eval_split", None)
    if values.get("global_batch_size") or values.get("auto_batch_size"):
        values.pop("scale_lr", None)
    if values.get("local_sgd_steps"):
        for name in ("comm_hook", "find_unused_parameters", "static_graph", "checkpointing_steps"):
            values.pop(name, None)
    if values.get("streaming"):
        values.pop("cache", None)
        values.pop("val_fraction", None)
    if values.get("optimizer") != "sgd" or not values.get("momentum", 1):
        values.pop("nesterov", None)
    if values.get("min_lr", 0) > values.get("lr", Config.lr):
        del values["min_lr"]
    # They cannot be told from an unset text, on the command line either.
    for name, hint in get_type_hints(Config).items():
        if values.get(name) in ("null", "~") and type(None) in get_args(hint):
            del values[name]
    return Config(**values)


@pytest.mark.parametrize("number", range(25))
def test_a_written_config_reads_back_equal(number: int) -> None:
    config = a_config(random.Random(number)) if number else Config()
    Path("config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False), encoding="utf-8")
    assert parse(["--config", "config.yaml"]) == config
