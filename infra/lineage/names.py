"""Names in MLflow that writer and walker share: experiments, tags, contexts, artifacts."""

TARGETS = "eagle3/targets"
EXTRACTION = "eagle3/extraction"
VALIDATION = "eagle3/validation"
TRAINING = "eagle3/training"
BENCHMARK = "eagle3/benchmark"

# Tags of runs and of the target's model
KEY = "eagle3.key"  # what was recorded, as a digest: a retry finds the first recording by it
MODEL_ID = "eagle3.model_id"
VERDICT = "eagle3.verdict"
REPORT = "report.sha256"
PROMPTS_NAME = "prompts.name"
PROMPTS_SHA256 = "prompts.sha256"
PREFECT_URL = "prefect.flow_run_url"
NOTE = "mlflow.note.content"  # MLflow shows it as the description, as markdown
IS_EXTERNAL = "mlflow.model.isExternal"

# Tags of the drafter's model and of its registered versions
DUMP_URI = "dump.uri"
DUMP_SHA256 = "dump.sha256"
CHECKPOINT_URI = "checkpoint.uri"
CONTRACT_SHA256 = "contract.sha256"
WEIGHTS_SHA256 = "weights.sha256"
CAPTURE_POINTS = "capture.points"
CAPTURE_FINAL = "capture.final"
TARGET_NAME = "target.name"
TARGET_WEIGHTS = "target.weights_sha256"

# The context of a dataset says what the run did with it
CONTEXT = "mlflow.data.context"
OUTPUT, CHECKED, TRAINED_ON, MEASURED_ON = "output", "validation", "training", "eval"

LONG_VALUES = "long_values.json"
SETTING = "spec."
