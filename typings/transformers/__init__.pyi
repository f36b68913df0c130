# Where the names that posttrain takes from transformers are: without this, pyright reads all of its models first.

from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessor as LogitsProcessor
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria as StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.tokenization_utils_base import BatchEncoding as BatchEncoding
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils.quantization_config import BitsAndBytesConfig as BitsAndBytesConfig

PreTrainedTokenizerFast = TokenizersBackend
