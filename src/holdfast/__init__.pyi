"""The public names, for type checkers and editors. docs/guide/python.md explains them."""

from holdfast.api.alone import run as run
from holdfast.api.reading import Checkpoint as Checkpoint
from holdfast.api.reading import batches as batches
from holdfast.api.reading import follow as follow
from holdfast.api.reading import journal as journal
from holdfast.api.reading import open_checkpoint as open_checkpoint
from holdfast.api.reading import summary as summary
from holdfast.api.training import RunFile as RunFile
from holdfast.api.training import TrainingResult as TrainingResult
from holdfast.api.training import load_run_file as load_run_file
from holdfast.api.training import train as train
from holdfast.core.sharding.parameters import Normal as Normal
from holdfast.core.sharding.parameters import Ones as Ones
from holdfast.core.sharding.parameters import Zeros as Zeros
from holdfast.errors import TaskError as TaskError
from holdfast.errors import UserError as UserError
from holdfast.tasks.task.task import Batch as Batch
from holdfast.tasks.task.task import PipelineTask as PipelineTask
from holdfast.tasks.task.task import Samples as Samples
from holdfast.tasks.task.task import Task as Task

__version__: str
