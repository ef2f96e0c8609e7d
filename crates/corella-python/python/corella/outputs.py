"""Results, by the name of vLLM's module."""

from corella.output import CompletionOutput as CompletionOutput
from corella.output import RequestOutput as RequestOutput
from corella.pooled_output import ClassificationOutput as ClassificationOutput
from corella.pooled_output import ClassificationRequestOutput as ClassificationRequestOutput
from corella.pooled_output import EmbeddingOutput as EmbeddingOutput
from corella.pooled_output import EmbeddingRequestOutput as EmbeddingRequestOutput
from corella.pooled_output import PoolingOutput as PoolingOutput
from corella.pooled_output import PoolingRequestOutput as PoolingRequestOutput
from corella.pooled_output import ScoringOutput as ScoringOutput
from corella.pooled_output import ScoringRequestOutput as ScoringRequestOutput
