import copy
import io

from rich.console import Console

from smalti.estimate.report import compare, entries_of, tables
from tests.estimate.report import records


def shown(show, *args, **options):
    out = io.StringIO()
    show(Console(file=out, width=120), *args, **options)
    return out.getvalue()


def test_attention():
    text = shown(tables.show_attention, records.attention())
    assert "attention forward on v6e: B=1,Hq=1,Hkv=1,Sq=256,Sk=256,D=128 bfloat16" in text
    peers = entries_of(records.attention())
    for name, found in peers.items():
        (row,) = [line for line in text.splitlines() if name in line and "×" in line]
        assert f"{found['cycles']:,.0f}" in row
        assert found["bound"] in row
    assert "1.00×" in text
    assert "no kernel" in text
    assert "ours: none, because no kernels yet" in text
    assert "splash: none, because VMEM is exhausted\n" in text
    assert "one variant of 2 gave no estimate: --verbose says why" in text
    assert records.LABEL in text
    assert "the unit is one TensorCore" in text
    assert "too large" not in text


def test_attention_verbose():
    text = shown(tables.show_attention, records.attention(), verbose=True)
    assert "jax_flash block_q=256: too large" in text
    assert "VMEM is exhausted\nat length" in text


def test_fn_in_the_order_of_the_schedule():
    text = shown(tables.show_fn, records.fn())
    assert "what was lowered: 1 Pallas kernel (double.1)" in text
    assert "HBM peak" in text
    assert text.rindex("double.1") < text.index("compiler  ")
    assert text.count(records.LABEL) == 2
    assert "assumed: operations run one after the other" in text


def test_fn_the_longest_first():
    record = records.fn()
    longest = max(record["ops"], key=lambda op: op["cycles"])["name"]
    text = shown(tables.show_fn, record, longest=1)
    assert "the 1 longest of 2 operations" in text
    assert longest in text[text.index("the 1 longest") :]


def test_source():
    text = shown(tables.show_source, "jax_flash", records.fn("jax_flash"))
    assert "flash_attention.py:" in text
    assert "bundles without a line of the source" in text
    assert records.LABEL in text
    few = shown(tables.show_source, "jax_flash", records.fn("jax_flash"), 3)
    assert "more lines, which --json lists" in few
    assert shown(tables.show_source, "xla", records.fn("xla")) == (
        "xla: no Pallas kernel, so no lines\n"
    )


def test_brackets_of_the_source_are_no_markup():
    record = copy.deepcopy(records.fn())
    for line in record["kernels"][0]["lines"]:
        line["text"] = "y = x[bold] + z[/bold]"
    assert "y = x[bold] + z[/bold]" in shown(tables.show_source, "double", record)


def test_comparison():
    after = copy.deepcopy(records.fn())
    for line in after["kernels"][0]["lines"]:
        line["cycles"] += 1000 if line["file"] else 0
    (one,) = compare(records.fn(), after)
    text = shown(tables.show_comparison, one)
    assert "+1,000" in text
    assert "programs.py: " in text
    assert "equal in both" in text
    assert records.LABEL in text
    shortened = shown(tables.show_comparison, one, 1)
    assert "1 more lines changed, by +1,000 cycles" in shortened


def test_a_time_that_leaves_something_out_says_so():
    unpriced = [{"name": "sort.1", "opcode": "sort", "op_name": "", "count": 3, "bytes_moved": 8}]
    record = {**records.fn(), "unpriced": unpriced}
    assert f"≥ {record['cycles']:,.0f} " in shown(tables.show_fn, record)
    assert "3× sort sort.1" in shown(tables.show_fn, record, verbose=True)
    attention = copy.deepcopy(records.attention())
    attention["peers"]["xla"]["unpriced"] = unpriced
    text = shown(tables.show_attention, attention)
    assert f"≥ {attention['peers']['xla']['cycles']:,.0f} " in text
    assert "xla\n  a lower bound: 3 of its operations have no price" in text
