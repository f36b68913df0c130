"""The settings of a run: the schema with every default, and reading them from files, presets, overrides and flags."""

from posttrain.config.reading.load import Loaded, dump, find, load, preset_names
from posttrain.config.reading.stages import Stage, check_skip, held_out_together
from posttrain.config.schema.data import DataConfig, SourceConfig, TagsConfig
from posttrain.config.schema.distill import DistillMethod
from posttrain.config.schema.evaluation import EvaluationConfig, EvaluationDataset
from posttrain.config.schema.model import LoraConfig, ModelConfig
from posttrain.config.schema.offline import DPOMethod, KTOMethod, RewardMethod, SFTMethod
from posttrain.config.schema.online import GRPOMethod, PPOMethod
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import RunConfig, learning_rate
from posttrain.config.schema.training import CheckpointConfig, DevicesConfig, TrackingConfig

__all__ = [
    "CheckpointConfig", "DPOMethod", "DataConfig", "DevicesConfig", "DistillMethod", "EvaluationConfig",
    "EvaluationDataset", "GRPOMethod", "KTOMethod", "Loaded", "LoraConfig", "ModelConfig", "PPOMethod", "RewardMethod",
    "RolloutConfig", "RunConfig", "SFTMethod", "SourceConfig", "Stage", "TagsConfig", "TrackingConfig", "check_skip",
    "dump", "find", "held_out_together", "learning_rate", "load", "preset_names",
]  # fmt: skip
