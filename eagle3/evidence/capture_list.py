"""Did the engine capture what the spec asks for? The live model's own list, and the meaning of the ids it was sent."""

from eagle3.conventions import ConventionError, ids_of, points_of
from eagle3.conventions.sglang import live_points
from eagle3.dump.manifest import Manifest
from eagle3.evidence.report import Check


def check_capture_list(manifest: Manifest) -> Check:
    """`capture_list`: the boundaries that the running model held, in delivered order, are the spec's slots."""
    live, wanted = manifest.engine.live, manifest.spec.aux
    value = f"layers_to_capture {list(live.layers_to_capture)} of {live.model_class}"
    threshold = ", ".join(wanted)
    try:
        found = live_points(
            live.layers_to_capture,
            manifest.target.num_layers,
            model_class=live.model_class,
            version=manifest.engine.version,
        )
    except ConventionError as error:
        sentence = f"What the live model captured cannot be the dump's slots: {error}. Extract again."
        return Check(name="capture_list", verdict="fail", value=value, threshold=threshold, sentence=sentence)
    value += f" = {', '.join(found)}"
    if found == wanted:
        sentence = "The running model captured exactly the slots of the spec, in their order."
        return Check(name="capture_list", verdict="pass", value=value, threshold=threshold, sentence=sentence)
    what = f"it captured {', '.join(found)}, and the dump calls them {', '.join(wanted)}"
    if set(found) == set(wanted):
        cause = "The slots are the right ones in another order (SGLang delivers in the order of the layers)"
    else:
        cause = f"The ids {list(manifest.engine.ids.ids)} mean other layers on this model class and version"
    sentence = f"The live model did not capture what the labels say: {what}. {cause}. {_remedy(manifest)}"
    return Check(name="capture_list", verdict="fail", value=value, threshold=threshold, sentence=sentence)


def check_engine_ids(manifest: Manifest) -> Check:
    """`engine_ids`: the ids that were sent mean the spec's slots under their declared version and model class.

    Where that version or class is not known this warns: the live list, which was seen, decides.
    """
    engine, wanted = manifest.engine, manifest.spec.aux
    value, threshold = str(engine.ids), ", ".join(wanted)
    if (engine.ids.engine, engine.ids.version) != (engine.name, engine.version):
        sentence = (
            f"The ids are declared for {engine.ids.engine} {engine.ids.version}, but {engine.name} {engine.version} "
            "served: the same ids can mean other layers there. Record the version that served, and check the ids."
        )
        return Check(name="engine_ids", verdict="fail", value=value, threshold=threshold, sentence=sentence)
    try:
        found = points_of(engine.ids, manifest.target.num_layers)
    except ConventionError as error:
        sentence = f"What the ids mean is not known: {error} The live list (capture_list) decides."
        return Check(name="engine_ids", verdict="warn", value=value, threshold=threshold, sentence=sentence)
    value += f" = {', '.join(found)}"
    if found != wanted:
        sentence = (
            f"The ids that were sent mean {', '.join(found)} under {engine.name} {engine.version} for "
            f"{engine.ids.model_class}, and the dump calls its slots {', '.join(wanted)}. {_remedy(manifest)}"
        )
        return Check(name="engine_ids", verdict="fail", value=value, threshold=threshold, sentence=sentence)
    sentence = "The ids that were sent mean the spec's slots, by the engine's convention."
    return Check(name="engine_ids", verdict="pass", value=value, threshold=threshold, sentence=sentence)


def _remedy(manifest: Manifest) -> str:
    engine = manifest.engine
    try:
        ids = ids_of(
            manifest.spec.aux,
            engine=engine.name,
            version=engine.version,
            model_class=engine.ids.model_class,
            num_layers=manifest.target.num_layers,
        )
    except ConventionError as error:
        return f"{error}."
    return f"Send {list(ids.ids)} instead and extract again; do not rename the slots of a dump by hand."
