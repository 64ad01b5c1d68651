"""Whether a case lies inside what a target declares."""

from __future__ import annotations

from fuzz.case import Case, Pool
from fuzz.features import labels
from fuzz.probes import unfit
from fuzz.space import Space, prefix_of, unpaired
from oracle.declare import Declaration
from oracle.kinds import KVLayout


def unsupported(declaration: Declaration, case: Case) -> str | None:
    """Why ``case`` is outside the declared capabilities, or None."""
    if case.operation is not declaration.operation:
        return f"its operation is {declaration.operation}, the case's {case.operation}"
    convention = declaration.convention
    if case.kv_layout is not convention.kv_layout:
        return f"its layout is {convention.kv_layout}, the case's {case.kv_layout}"
    if case.kv_layout is KVLayout.SHUFFLE_5D and case.v_layout is not convention.v_layout:
        return f"its V layout is {convention.v_layout}, the case's {case.v_layout}"
    if case.is_attention and case.index_form is not convention.index_form:
        return f"its index form is {convention.index_form}, the case's {case.index_form}"
    if case.prefix is not prefix_of(declaration):
        return f"it finds prefixes elsewhere than {case.prefix}"
    if case.index_task is not declaration.task:
        return f"its task is {declaration.task}, the case's {case.index_task}"
    dimensions = Space(declaration, huge=case.pool is Pool.HUGE).dimensions
    # A prefix of one key comes with one query or some, which are what is declared.
    for name, label in sorted(labels(case) - {("query", "but_one")}):
        if name in dimensions and name != "length" and label not in dimensions[name]:
            if (name, label) == ("query", "empty"):
                return "a request has more queries than keys: rows without a visible key are not declared"
            return f"{name} {label} is not declared; declared: {', '.join(dimensions[name])}"
    if convention.descales.fp8_only and case.is_attention:
        own = {name: label for name, label in labels(case) if name in ("kv_dtype", "k_descale", "v_descale")}
        return unpaired(own) or unfit(case)
    return unfit(case)
