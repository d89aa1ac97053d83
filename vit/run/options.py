"""The options of `vit fit`, `validate` and `test`: LightningCLI's parser, with exact names and plain messages.

Order: what is typed, wherever it stands, goes over files (--config, a later one over an earlier one), files over
the environment (VIT_FIT__MODEL__OPTIM__LR=1e-4), and that over defaults.
"""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml
from jsonargparse import ActionYesNo, ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import vit.data  # noqa: F401  (its sources are then known by their bare names)
from vit.data.mix import Mixing
from vit.data.module import ImageDataModule
from vit.data.multicrop import MultiCrop
from vit.data.source import Source
from vit.data.table import DataTable
from vit.run.configs import find_config
from vit.run.messages import plain_message
from vit.tasks.autoregressive import Autoregressive
from vit.tasks.classify import Classifier
from vit.tasks.dino import DINO, HeadConfig
from vit.tasks.dino_teacher import TeacherConfig
from vit.tasks.losses import LossConfig
from vit.tasks.mae import MAE, DecoderConfig
from vit.tasks.masked import MaskedPatches
from vit.tasks.methods import TuningConfig
from vit.tasks.optim import OptimConfig, ScheduleConfig
from vit.tasks.options import EncoderOptions, PreprocessingOptions
from vit.tasks.pretrain import Pretraining

TRAINER_DEFAULTS: dict[str, Any] = {
    # One device unless asked for: Lightning's default would start a process per GPU.
    "devices": 1,
    "default_root_dir": "outputs",
    "precision": None,
    # The order of training pictures and their share per process are the sampler's.
    "use_distributed_sampler": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 1,
    "logger": None,
}


OBJECTIVES: dict[str, type[Pretraining]] = {cls.__name__: cls for cls in (MaskedPatches, MAE, Autoregressive, DINO)}
"""Objectives of pre-training, which `--model` takes by name."""


class PlainErrors(ArgumentParser):
    """A parser whose errors are one message each instead of the usage of 150 options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message, with the nearest right name where a name is wrong."""
        raise ValueError(plain_message(message, self._names(), data_sources())) from None

    def _names(self) -> list[str]:
        options = [name for action in self._actions for name in action.option_strings]
        return [name.lstrip("-") for name in options if name.startswith("--") and not name.endswith(".help")]


class Parser(PlainErrors, LightningArgumentParser):
    """Lightning's parser with plain errors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, default_env=True, **kwargs)


def data_sources() -> dict[str, type]:
    """Data sources that `--data` takes by name."""
    return {cls.__name__: cls for cls in sorted(_subclasses(Source), key=lambda cls: cls.__name__)}


def _subclasses(cls: type) -> list[type]:
    children: list[type] = cls.__subclasses__()
    return children + [deep for child in children for deep in _subclasses(child)]


_HELP = {
    "fit": {
        "usage": "vit fit --config NAME|FILE [--data SOURCE] [--OPTION VALUE ...]",
        "description": "Train. Examples: vit fit --config quickstart; vit fit --config finetune_folder --data.root "
        "photos; vit fit --resume outputs/quickstart/1 --trainer.max_epochs 60. Options of a data source: "
        "vit fit --data.help Folder.",
    },
    "validate": {
        "usage": "vit validate RUN [--OPTION VALUE ...]",
        "description": "Score the best checkpoint of a run on its val split. Options change the run's own.",
    },
    "test": {
        "usage": "vit test RUN [--OPTION VALUE ...]",
        "description": "Score the best checkpoint of a run on its test split. Options change the run's own.",
    },
}


class Options(LightningCLI):
    """The parsed options of one verb; `build` makes the data and the model from them.

    Args:
        verb: fit, validate or test.
        args: the words behind it.

    Attributes:
        config: every option, as a `jsonargparse.Namespace`.

    Raises:
        ValueError: an unknown option, or a value of the wrong kind.
    """

    def __init__(self, verb: str, args: Sequence[str]) -> None:
        self.given = ordered = configs_first(args)
        name = _named_model(ordered)
        self.pretraining = name in OBJECTIVES
        self.own_model = name is not None and not self.pretraining
        self._split_as: Path | None = None
        self._table: DataTable | None = None
        super().__init__(
            model_class=None if name is not None else Classifier,
            save_config_callback=None,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=False,
            parser_class=Parser,
            parser_kwargs={"prog": f"vit {verb}", "env_prefix": f"VIT_{verb.upper()}_", **_HELP[verb]},
            args=ordered,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options of the run as a whole."""
        # Both are read before all others, see `vit.api.fit_command`; here they are for --help.
        parser.add_argument("--resume", type=str | None, help="Run folder to go on in; needs no other option.")
        parser.add_argument("--dry_run", action="store_true", help="Print the plan and stop; nothing is written.")
        parser.add_argument(
            "--recipe",
            type=Literal["auto", "paper", "none"],
            default="auto",
            help="Who chooses what was not set: auto looks at pictures, weights and machine; paper is that of the ViT "
            "paper, table 4; none takes the defaults. The plan says what was chosen and why.",
        )
        # Read before all others too, see `vit.run.many`.
        parser.add_argument("--seeds", type=int, default=1, help="Train so many runs, which differ in their seed.")
        parser.add_argument("--folds", type=int | None, help="Cross-validate: train as many runs as folds.")
        parser.add_argument("--name", type=str | None, help="Name of the run's parent folder. Default: the config's.")
        parser.add_argument("--seed", type=int, default=0, help="Of everything random in the run.")
        parser.add_argument(
            "--monitor",
            type=str | None,
            help="Value that chooses the best checkpoint: val_acc, val_balanced_acc, val_top5 (of 6 classes or more), "
            "val_loss; of several labels val_map, val_f1, val_micro_f1, val_loss. Default: the first, or the recipe's.",
        )
        parser.add_argument(
            "--patience",
            type=int | None,
            help="End when the monitored value has not improved for so many validations. Default: train to the end.",
        )
        flag: dict[str, Any] = {"action": ActionYesNo, "nargs": "?", "default": False}
        parser.add_argument("--find_batch_size", **flag, help="Search the largest batch that fits first.")
        parser.add_argument("--find_lr", **flag, help="Search a learning rate first, by a short sweep.")
        parser.add_argument(
            "--soup",
            type=int,
            default=1,
            help="Keep so many of the best checkpoints, and average those that are better together on the val split.",
        )
        parser.add_argument(
            "--save_every_n_steps",
            type=int | None,
            help="Write last.ckpt every n optimizer steps too, not only after each epoch.",
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Trainer, model and data; the model's classes and seed come from elsewhere."""
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        parser.add_subclass_arguments((Source, LightningDataModule), "data", fail_untyped=False, required=True)
        if self.own_model:
            parser.add_subclass_arguments(LightningModule, "model", fail_untyped=False, required=True)
            parser.link_arguments("data", "model.init_args.num_classes", _num_classes, apply_on="instantiate")
        elif self.pretraining:
            parser.add_subclass_arguments(Pretraining, "model", required=True, skip={"seed"}, instantiate=False)
        else:
            parser.add_class_arguments(
                Classifier, "model", skip={"classes", "several", "seed"}, sub_configs=True, instantiate=False
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse without LightningCLI's warning about arguments that were not typed."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Nothing: what a checkpoint remembers never goes over what was typed."""

    def _set_seed(self) -> None:
        """Nothing: the run seeds itself when it starts."""

    def instantiate_classes(self) -> None:
        """Nothing yet: see `build`."""

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        """Nothing: the model has its own."""

    @property
    def of_model(self) -> Namespace:
        """The options of the model, whether its class is named or not."""
        model = self.config.model
        return (model.get("init_args") or Namespace()) if "class_path" in model else model

    def data(self) -> LightningDataModule:
        """Make the data from the options as they are now; the pictures are scanned once.

        Raises:
            ValueError: data that are not there.
        """
        self.made = self.parser.instantiate(self.config)
        data = self.made.data
        data = ImageDataModule(data) if isinstance(data, Source) else data
        if isinstance(data, ImageDataModule):
            if self._table is None:
                self._table = data.table if self._split_as is None else data.source.table(self._split_as)
            data.__dict__["table"] = self._table
        return data

    def split_as(self, file: Path) -> None:
        """Divide the pictures as they were in an earlier run, whatever the options ask for.

        Args:
            file: the `split.parquet` of that run.
        """
        self._split_as, self._table = file, None

    def build(self) -> tuple[LightningDataModule, LightningModule]:
        """Make the data and the model, which takes its classes from the data.

        Raises:
            ValueError: data that are not there, or a model that cannot be built.
        """
        data = self.data()
        if self.own_model:
            return data, self.made.model
        if self.pretraining:
            named = self.config.model.as_dict()
            objective = OBJECTIVES[named["class_path"].rpartition(".")[2]]
            return data, objective(**_made(named.get("init_args") or {}), seed=self.config.seed)
        if not hasattr(data, "classes"):
            raise ValueError(
                f"expected a datamodule with the class names in `classes`, but {type(data).__name__} has none: "
                "add the attribute, or give a model of your own that does without."
            )
        made = _made(self.config.model.as_dict())
        several = isinstance(data, ImageDataModule) and data.table.several
        return data, Classifier(**made, classes=list(data.classes), several=several, seed=self.config.seed)

    def by_hand(self) -> Namespace:
        """Only the options that were given, on the command line or in files."""
        return self.parser.parse_args(self.given, defaults=False)

    def typed(self) -> str:
        """Only the options that were given, as YAML."""
        return self._yaml(self.by_hand())

    def dump(self) -> str:
        """All options as YAML that `--config` reads back."""
        return self._yaml(self.config)

    def _yaml(self, config: Namespace) -> str:
        try:
            return self.parser.dump(config, skip_unset=False)
        except ValueError:
            # jsonargparse cannot write some values that it has read, such as the enumerations of Lightning's Timer.
            values = {k: v for k, v in config.as_dict().items() if k != "config"}
            return yaml.safe_dump(_plain_values(values), sort_keys=False)


def _made(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a model, with the configurations among them made from their values."""
    return {name: _KINDS[name](**value) if name in _KINDS else value for name, value in options.items()}


_KINDS: dict[str, type] = {
    "encoder": EncoderOptions,
    "tuning": TuningConfig,
    "loss": LossConfig,
    "optim": OptimConfig,
    "schedule": ScheduleConfig,
    "mixing": Mixing,
    "preprocessing": PreprocessingOptions,
    "decoder": DecoderConfig,
    "views": MultiCrop,
    "projection": HeadConfig,
    "teacher": TeacherConfig,
}


def _plain_values(value: Any) -> Any:
    if isinstance(value, Namespace):
        value = value.as_dict()
    if isinstance(value, dict):
        return {key: _plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_values(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value if value is None or type(value) in (bool, int, float, str) else str(value)


def _num_classes(data: Any) -> int:
    return ImageDataModule(data).num_classes if isinstance(data, Source) else data.num_classes


def configs_first(args: Sequence[str]) -> list[str]:
    """Put all `--config` before other options, so that what is typed wins over files in any order.

    Bare names of packaged configurations become paths.

    Raises:
        ValueError: a configuration that does not exist.
    """
    first, rest = [], []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("-c", "--config"):
            value = value if equals else next(words, "")
            first += ["--config", str(find_config(value))]
        else:
            rest.append(word)
    return first + rest


def _named_model(args: Sequence[str]) -> str | None:
    """The class that the options name as the model, without its module; None where they leave it to `Classifier`."""
    name: str | None = None
    for word, following in zip(args, [*args[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option == "--config":
            try:
                values = yaml.safe_load(Path(value if equals else following).read_text(encoding="utf-8")) or {}
                model = values.get("model")
            except (yaml.YAMLError, AttributeError, UnicodeDecodeError) as error:
                raise ValueError(f"expected YAML options in {following}, but it cannot be read: {error}") from error
            if isinstance(model, dict) and model:
                name = model.get("class_path")
            elif isinstance(model, str):
                name = model
        elif option in ("--model", "--model.class_path", "--model.help"):
            name = (value if equals else following) or None
    return None if name is None else name.rpartition(".")[2]
