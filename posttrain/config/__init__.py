"""The settings of a run: the schema with every default, and reading them from files, presets, overrides and flags."""

from posttrain.config.data import DataConfig, SourceConfig, TagsConfig, ValidationConfig
from posttrain.config.evaluation import EvaluationConfig, EvaluationDataset
from posttrain.config.load import Loaded, dump, find, load
from posttrain.config.methods import (
    CPOMethod,
    DPOMethod,
    KTOMethod,
    Method,
    ORPOMethod,
    RewardMethod,
    SFTMethod,
    SimPOMethod,
)
from posttrain.config.model import LoraConfig, ModelConfig
from posttrain.config.online import (
    GRPOMethod,
    OnlineMethod,
    PolicyGradientMethod,
    PPOMethod,
    ReinforcePlusPlusMethod,
    RLOOMethod,
)
from posttrain.config.presets import preset_names, preset_path
from posttrain.config.rollout import RolloutConfig
from posttrain.config.schema import (
    CheckpointConfig,
    DevicesConfig,
    RunConfig,
    TrackingConfig,
    TrainingConfig,
    learning_rate,
)
from posttrain.config.stages import Stage, check_skip

__all__ = [
    "CPOMethod",
    "CheckpointConfig",
    "DPOMethod",
    "DataConfig",
    "DevicesConfig",
    "EvaluationConfig",
    "EvaluationDataset",
    "GRPOMethod",
    "KTOMethod",
    "Loaded",
    "LoraConfig",
    "Method",
    "ModelConfig",
    "ORPOMethod",
    "OnlineMethod",
    "PPOMethod",
    "PolicyGradientMethod",
    "RLOOMethod",
    "ReinforcePlusPlusMethod",
    "RewardMethod",
    "RolloutConfig",
    "RunConfig",
    "SFTMethod",
    "SimPOMethod",
    "SourceConfig",
    "Stage",
    "TagsConfig",
    "TrackingConfig",
    "TrainingConfig",
    "ValidationConfig",
    "check_skip",
    "dump",
    "find",
    "learning_rate",
    "load",
    "preset_names",
    "preset_path",
]
