"""Messages with a remedy that no case carries out, each with its reason.

`test_remedies_of_rooms.py` fails for a message that is neither in a table nor here, and for one
that is here without need.
"""

from __future__ import annotations

NOT_CARRIED_OUT: dict[str, tuple[str, ...]] = {
    "it goes away only while other processes or machines are at work, or once they have ended": (
        "chaos/campaign.py: another chaos command is at work here",
        "chaos/campaign.py: the undisturbed run ended with …: …",
        "chaos/campaign.py: this holds what another campaign made, of other faults or "
        "settings, or by other code",
        "chaos/network.py: (up)",
        "chaos/network.py: a network has room for … nodes",
        "chaos/network.py: … is no node of this network",
        "chaos/network.py: …: …",
        "checkpoint/bucket/copy.py: somebody else writes … there at the same time",
        "checkpoint/bucket/copy.py: somebody removed or changed … there while the "
        "checkpoint was copied",
        "checkpoint/bucket/copy_lease.py: (acquire)",
        "checkpoint/bucket/copy_lease.py: … | the claim of this copy was taken over there",
        "checkpoint/peers/generation_floor.py: … does not accept the secret of this run "
        "folder, which is new",
        "checkpoint/restore/restore_point.py: none of … checkpoints can be trusted",
        "checkpoint/restore/restore_point.py: this run had a checkpoint of step …, and "
        "none is left",
        "cli/join.py: no run has been started here",
        "cli/notice.py: (_post)",
        "cli/notice.py: (notice)",
        "cli/notice.py: a node without a name",
        "cli/notice.py: a notice of … seconds makes no sense",
        "cli/notice.py: nobody is training here, or on another machine, or with another "
        "secret than is known here",
        "cli/read_errors.py: …; a run in progress may have removed it",
        "cli/report.py: no step of this run was traced",
        "cli/report.py: the trace cannot be written (…)",
        "cli/report.py: the trace cannot be written: this is a folder",
        "cli/stage.py: … GB are more than this machine has free",
        "cli/stage.py: … GB keep nothing",
        "cli/stage.py: … is not an address",
        "data/unit_tasks.py: the source changed while it was being prepared",
        "elastic/run_result.py: process … on … trains this run without other nodes",
        "export/weights.py: the run removes its checkpoints faster than they can be read",
        "launch/run_folder.py: another secret than is known here is the run's: …",
        "launch/run_folder.py: another trainer uses this run folder: …",
        "launch/run_folder.py: … leads the run and listens on …, which only its own "
        "machine reaches",
        "launch/unlike_node.py: … is … here and … on the nodes at work; it has to be "
        "alike on all nodes of a run",
        "report/trackers/process.py: this is not the position of a tracker",
    ),
    "an operator mends a disk; tests/system/test_full_disk.py and test_sick_disk.py have such": (
        "data/files.py: the disk is full; what is finished stays and is not done again",
        "data/files.py: … cannot be opened: …",
        "launch/branch.py: the branch cannot be made here (…)",
        "launch/run_folder.py: cannot be moved to … (…)",
        "launch/run_folder.py: the disk is full",
        "launch/run_folder.py: the run folder cannot be written (…)",
        "launch/run_folder.py: the run folder is a mount point, which cannot be moved aside",
        "model/new_folder.py: the disk is full",
        "report/trackers/process.py: the tracker's folder cannot be written (…)",
        "wire/store/run_store.py: no permission to read or write the run folder",
        "wire/store/run_store.py: the disk is full",
        "wire/store/run_store.py: the file system can neither make hard links nor rename "
        "without replacing, and create-if-absent needs one of the two",
        "wire/store/run_store.py: the run folder's file system is read-only",
    ),
    "a package is missing: tests/cli/test_named_commands.py checks that its extra exists": (
        "data/chat_render.py: chat templates need jinja2 … or newer, and …",
        "data/columnar_sources.py: a Hugging Face source needs the datasets package",
        "data/columnar_sources.py: reading Arrow needs pyarrow",
        "data/columnar_sources.py: reading Parquet needs pyarrow",
        "data/columnar_sources.py: …, split …, cannot be loaded: …",
        "data/containers.py: reading .zst needs pyarrow",
        "report/trackers/registry.py: the tracker … needs …, which is not installed",
        "wire/store/location.py: this needs the package …",
    ),
    "the remedy is another machine, or another number of machines": (
        "cli/train.py: layout.workers is …, but more than one worker on cuda has not been run yet",
        "elastic/coordinator/generation_planner.py: this run continues …, and no "
        "checkpoint is left",
        "parallel/process_groups.py: more than one worker on … has not been run yet and is refused",
        "plan/planner.py: a step has … microbatches, and a pipeline under 1f1b needs more",
        "plan/planner.py: the smallest replica… needs … workers, there are places for …",
        "plan/planner.py: there is no place for a worker",
        "plan/replica_shapes.py: one of the … workers of a replica holds … bytes of "
        "parameters, gradients and moments, but … are allowed",
    ),
    "tests run as root, who may read each file": (
        "config/load.py: the run file cannot be read (…)",
        "data/source_files.py: cannot be read (…)",
        "data/vocabulary.py: … cannot be read (…)",
        "launch/runs.py: this cannot be read (…)",
    ),
    "it speaks of code: a task's author or a caller in Python changes a line of it": (
        "api/training.py: holdfast.train is called while a worker imports this file",
        "checkpoint/restore/reader.py: … has the shape … there, the box … at … is outside",
        "checkpoint/save/single_writer.py: step … of generation … is committed already",
        "core/format/manifest.py: format version … is newer than …",
        "core/sharding/reshard_plan.py: nobody who is left holds ……",
        "core/sharding/reshard_plan.py: … does not say for each of … ranks which one of "
        "… old ranks it was",
        "parallel/pipeline.py: the schedule … splits the backward, which these stages do not",
        "parallel/pipeline.py: … stages and … microbatches need more message tags than there are",
        "parallel/process_groups.py: context parallelism is not built yet",
        "parallel/reshard.py: ranks were told of different rebuilds",
        "parallel/reshard.py: some ranks hold the state after step …, other ranks that after …",
        "tasks/adapters.py: layer … is used under several names, so it cannot have an adapter",
        "tasks/adapters.py: the frozen parameters of the task are not those that the run "
        "was begun with: their checksum is …, and it was …",
        "tasks/ask.py: (_ask)",
        "tasks/batches.py: weight() returned …",
        "tasks/batches.py: … (…) has no length and no index, so a step cannot ask for its samples",
        "tasks/huggingface.py: model.code transformers needs the package transformers (…)",
        "tasks/huggingface.py: the weights in … lack …",
        "tasks/huggingface.py: there are no weights in …: it has no file *.safetensors",
        "tasks/huggingface.py: there is no … in …",
        "tasks/huggingface.py: … is an encoder-decoder, which does not continue a text",
        "tasks/huggingface.py: … of transformers lets a document see the one before it in a row",
        "tasks/initial.py: weights() has …, which is no parameter of the module",
        "tasks/named.py: module … (…) has no …",
        "tasks/named.py: the source of … has changed since this run was started",
        "tasks/named.py: … is no subclass of torch.optim.Optimizer",
        "tasks/named.py: …(…, …) returned …",
        "tasks/objective.py: loss() returned …",
        "tasks/objective.py: the forward pass changes buffer …, so the state would "
        "depend on which rank computes what",
        "tasks/objective.py: the loss depends on no parameter that is trained",
        "tasks/optimizer_probe.py: declares state … as …, and has … for a parameter of shape …",
        "tasks/optimizer_probe.py: declares … as …",
        "tasks/optimizer_probe.py: has no learning rate lr",
        "tasks/optimizer_probe.py: has no weight_decay",
        "tasks/optimizer_probe.py: has state … of two kinds: … and …",
        "tasks/optimizer_probe.py: has state …, … for a parameter of shape …: it is not "
        "elementwise, and is not declared",
        "tasks/optimizer_probe.py: keeps more than its state: after a restore, its third "
        "update is another one",
        "tasks/own.py: buffer … is merged, and dp_shard … cuts the microbatch that it is "
        "computed from",
        "tasks/own.py: the dataset has token ids up to …, and the model knows …",
        "tasks/own.py: the loss of a batch is …, and of the same samples twice …: it is a mean",
        "tasks/own.py: the same samples are different tensors when they are read again",
        "tasks/own.py: train.compile compiles the module's units, and it has none",
        "tasks/own.py: train.recompute … runs a unit again, which would change its buffer … a "
        "second time",
        "tasks/own.py: train.recompute … runs the module's units again, and it has none",
        "tasks/task.py: a sample is a …: return a dict of tensors",
        "tasks/validation.py: validation() has no samples",
        "train/recovery_agreement.py: (conclude)",
        "train/recovery_agreement.py: ranks were told of different rebuilds",
        "train/replica_check.py: workers … begin with other values of … than the rest",
        "train/task.py: the vocabulary size is not known yet",
    ),
    "an earlier message says it first: the check guards the code": (
        "data/chat_gate.py: nothing carries loss",
        "tasks/script.py: step.apply() came before step.batches()",
        "tasks/script_engine.py: step … was applied without its batches",
    ),
    "it takes two ranks; tests/system/test_own_loop.py trains with them": (
        "train/vote.py: the ranks have unlike learning rates: … and …",
    ),
    "it passes on the remedy that a child process has written down": (
        "data/unit_tasks.py: (read_refused)",
    ),
    "it takes the metadata service of a cloud, which is asked for credentials": (
        "wire/store/bucket_errors.py: no credentials were found",
    ),
}
