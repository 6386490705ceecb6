"""The README's table of the `hybrid` section, made from the docstrings under the fields."""

from __future__ import annotations

import ast
import inspect
import json
import re
from types import ModuleType
from typing import get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hybrid.config import training


def _docstrings(module: ModuleType) -> dict[str, dict[str, str]]:
    """class -> field -> the string under it."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = found.setdefault(node.name, {})
        for field, text in zip(node.body, node.body[1:], strict=False):
            named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if named and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                fields[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _section(annotation: object) -> type[BaseModel] | None:
    kinds = [annotation, *get_args(annotation)]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def config_table() -> list[str]:
    """Markdown rows: key, default, meaning."""
    texts = _docstrings(training)
    rows = ["| key | default | meaning |", "|---|---|---|"]

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            path = f"{prefix}.{field.alias or name}"
            inner = _section(field.annotation)
            if inner is not None:
                walk(inner, path)
                continue
            text = texts[model.__name__][name]
            meaning = re.sub(r"\s*Default[: ].*$", "", text).replace("|", "\\|")
            default = field.get_default(call_default_factory=True)
            value = "required" if default is PydanticUndefined else json.dumps(default)
            rows.append(f"| `{path}` | `{value}` | {meaning} |")

    walk(training.HybridConfig, "hybrid")
    return rows


if __name__ == "__main__":
    print("\n".join(config_table()))
