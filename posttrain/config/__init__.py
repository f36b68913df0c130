"""The settings of a run: the schema with every default, and reading them from files, presets, overrides and flags."""

from posttrain.config.load import Loaded, dump, find, load
from posttrain.config.methods import DPOMethod, Method, RewardMethod, SFTMethod
from posttrain.config.presets import preset_names, preset_path
from posttrain.config.schema import (
    CheckpointConfig,
    DataConfig,
    DevicesConfig,
    EvaluationConfig,
    EvaluationDataset,
    LoraConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
    TagsConfig,
    TrackingConfig,
    TrainingConfig,
    ValidationConfig,
    learning_rate,
)

__all__ = [
    "CheckpointConfig",
    "DPOMethod",
    "DataConfig",
    "DevicesConfig",
    "EvaluationConfig",
    "EvaluationDataset",
    "Loaded",
    "LoraConfig",
    "Method",
    "ModelConfig",
    "RewardMethod",
    "RunConfig",
    "SFTMethod",
    "SourceConfig",
    "TagsConfig",
    "TrackingConfig",
    "TrainingConfig",
    "ValidationConfig",
    "dump",
    "find",
    "learning_rate",
    "load",
    "preset_names",
    "preset_path",
]
