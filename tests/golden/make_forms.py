"""Writes forms.json: the tensors that Transformers 5 stores otherwise if a folder is not saved in the form of the
published models, with the published tensors of which they consist.

    .venv/bin/python tests/golden/make_forms.py

Each such tensor has the bytes of published tensors, one after another. For each family, the file lists the tensors of
one layer with experts, without the layer's prefix.
"""

import json
import tempfile
from pathlib import Path

from golden_shape import FAMILIES
from make_golden import make_module, set_up_transformers
from safetensors.torch import load_file

HERE = Path(__file__).parent


def saved(model, **options):
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **options)
        tensors = load_file(Path(folder) / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def parts(tensor, published):
    """Returns the names of the published tensors of whose bytes `tensor` consists."""
    found = []
    while tensor:
        name = next(name for name, values in published.items() if tensor.startswith(values))
        found.append(name)
        tensor = tensor[len(published[name]) :]
    return found


def form(name):
    """Returns the tensors that differ in a family's last layer with experts, and their parts."""
    model = make_module(name, 0)
    published = saved(model)
    modules = saved(model, save_original_format=False)
    renamed = [name for name in modules if name not in published]
    layer = max((name[: name.index(".", len("model.layers."))] + "." for name in renamed), default=None)
    return {
        name.removeprefix(layer): [part.removeprefix(layer) for part in parts(modules[name], published)]
        for name in sorted(renamed)
        if name.startswith(layer)
    }


def main():
    set_up_transformers()
    forms = {name: form(name) for name in FAMILIES}
    lines = [f"  {json.dumps(name)}: {json.dumps(tensors)}" for name, tensors in forms.items() if tensors]
    (HERE / "forms.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
