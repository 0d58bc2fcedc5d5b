"""The formats of tool calls: what each is made of, which models write it, and what tells it in a chat template."""

from __future__ import annotations

from typing import NamedTuple

from slotwise.api.parsers.base_parser import Format
from slotwise.api.parsers.gemma_calls import Quoted, QuotedCalls
from slotwise.api.parsers.harmony import Harmony, HarmonyLayout
from slotwise.api.parsers.json_calls import ObjectCalls, Objects
from slotwise.api.parsers.llama3_json import Llama3Json, LlamaLayout
from slotwise.api.parsers.mistral_calls import MistralCalls
from slotwise.api.parsers.named_calls import Functionary, Named, NamedCalls
from slotwise.api.parsers.pythonic import Python, PythonCalls
from slotwise.api.parsers.xml_calls import NestedXml, NestedXmlCalls, Xml, XmlCalls

HARMONY = "openai"
HERMES = "hermes"  # also of calls as `text.normalization` asks for them, where a template ignores tools

_ARGUMENTS = ("<arg_key>", "</arg_key>", "</arg_value>")  # of GLM
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _invoke(prefix: str, around: tuple[str, str], *sections: tuple[str, str]) -> Xml:
    """Elements `invoke` and `parameter`, whose tags have a prefix."""
    return Xml(f'<{prefix}invoke name="', '"', f'<{prefix}parameter name="', '"', f"</{prefix}parameter>",
               f"</{prefix}invoke>", tag_end=">", sections=sections, around=around)


class Signs(NamedTuple):
    """What tells a format in a template's source: it has all of some texts and none of others."""

    all: tuple[str, ...]
    none: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {
    "hermes": Format("Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, Ernie 4.5, and many more", ObjectCalls, Objects(
        ("<tool_call>",), "</tool_call>", is_list=False, break_="\n")),
    "llama3_json": Format("Llama 3.1, 3.2 and 3.3", Llama3Json, LlamaLayout()),
    "mistral": Format("Mistral, all generations", MistralCalls, tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    HARMONY: Format("gpt-oss", Harmony, HarmonyLayout(), Harmony.SPELLINGS),
    "pythonic": Format("Llama 3.2 and 4, and others that call tools in a list, as Python does", PythonCalls, Python(
        "<|python_start|>", "<|python_end|>", is_first=True)),
    "lfm2": Format("LFM2 and LFM2.5", PythonCalls, Python("<|tool_call_start|>", "<|tool_call_end|>")),
    "olmo3": Format("Olmo 3", PythonCalls, Python("<function_calls>", "</function_calls>", is_list=False)),
    "qwen3_xml": Format("Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5 and others", XmlCalls, Xml(
        "<function=", ">", "<parameter=", ">", "</parameter>", "</function>",
        sections=(("<tool_call>", "</tool_call>"),), has_breaks=True, is_lenient=True)),
    "seed_oss": Format("Seed-OSS", XmlCalls, Xml(
        "<function=", ">", "<parameter=", ">", "</parameter>", "</function>",
        sections=(("<seed:tool_call>", "</seed:tool_call>"),), is_lenient=True)),
    "glm45": Format("GLM-4.5 to 4.7, Laguna, Ling 3 and Spark 2.5", XmlCalls, Xml(
        "<tool_call>", "", *_ARGUMENTS, "</tool_call>", "<arg_value>")),
    "hy3": Format("Hunyuan 3", XmlCalls, Xml(
        "<tool_call:opensource>", "<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>",
        "</arg_value:opensource>", "</tool_call:opensource>", "<arg_value:opensource>",
        around=("<tool_calls:opensource>", "</tool_calls:opensource>"))),
    "minimax_m2": Format("MiniMax-M2", XmlCalls, _invoke(
        "", ("<minimax:tool_call>", "</minimax:tool_call>"))),
    "minimax_m3": Format("MiniMax-M3", NestedXmlCalls, NestedXml(
        "]<]minimax[>[", "<tool_call>", "</tool_call>"), ("]<]minimax[>[",)),
    "deepseek_v32": Format("DeepSeek V3.2", XmlCalls, _invoke(
        "｜DSML｜", ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")), ("｜DSML｜",)),
    "deepseek_v4": Format("DeepSeek V4", XmlCalls, _invoke(
        "｜DSML｜", ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")), ("｜DSML｜",)),
    "step3": Format("Step 3", XmlCalls, _invoke(
        "steptml:", ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"))),
    "muse": Format("Muse Glimmer", XmlCalls, _invoke(
        "atem:", ("<atem:function_calls>", "</atem:function_calls>"))),
    "minicpm5": Format("MiniCPM 5", XmlCalls, Xml(
        '<function name="', '"', '<param name="', '"', "</param>", "</function>", "", ">", has_cdata=True)),
    "kimi_k3": Format("Kimi K3", XmlCalls, Xml(
        '<|open|>call tool="', '"', '<|open|>argument key="', '"', "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>", tag_end="<|sep|>", around=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"))),
    "kimi_k2": Format("Kimi K2", NamedCalls, Named(
        "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), prefix="functions.")),
    "deepseek_v3": Format("DeepSeek V3 and R1", NamedCalls, Named(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "", "<｜tool▁call▁end｜>", _DEEPSEEK,
        ("\n```json\n", "\n```"))),
    "deepseek_v31": Format("DeepSeek V3.1", NamedCalls, Named(
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", _DEEPSEEK)),
    "solar": Format("Solar Open", NamedCalls, Named(
        "<|tool_call:begin|>", "<|tool_call:args|>", "<|tool_call:end|>", ("<|tool_calls|>", "<|calls|>"),
        id_end="<|tool_call:name|>")),
    "functionary_v31": Format("Functionary 3.1", NamedCalls, Named("<function=", ">", "</function>")),
    "functionary_v32": Format("Functionary 3.2", Functionary),
    "jamba": Format("Jamba, Hunyuan A13B, Apriel and MiniMax-M1", ObjectCalls, Objects(
        ("<tool_calls>",), "</tool_calls>")),
    "nemotron": Format("Nemotron Nano 2", ObjectCalls, Objects(("<TOOLCALL>",), "</TOOLCALL>")),
    "granite": Format("Granite 3", ObjectCalls, Objects(("<|tool_call|>", "<tool_call>"))),
    "granite-20b-fc": Format("Granite 20B for function calling", ObjectCalls, Objects(
        ("<function_call>",), is_list=False)),
    "cohere": Format("Command R7B, Command A and North", ObjectCalls, Objects(
        ("<|START_ACTION|>",), "<|END_ACTION|>", name="tool_name", arguments="parameters")),
    "command_r": Format("Command R and R+", ObjectCalls, Objects(
        ("Action:",), is_fenced=True, name="tool_name", arguments="parameters", break_="\n")),
    "apertus": Format("Apertus", ObjectCalls, Objects(("<|tools_prefix|>",), "<|tools_suffix|>", name="")),
    "phi4_mini_json": Format("Phi-4-mini", ObjectCalls, Objects(
        ("functools", "<|tool_call|>"), "<|/tool_call|>")),
    "internlm": Format("InternLM 2.5 and 3", ObjectCalls, Objects(
        ("<|action_start|><|plugin|>",), "<|action_end|>", arguments="parameters", is_list=False, break_="\n")),
    "gigachat3": Format("GigaChat 3", ObjectCalls, Objects(
        ("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
        "<|message_sep|>", is_list=False)),
    "longcat": Format("LongCat-Flash", ObjectCalls, Objects(
        ("<longcat_tool_call>",), "</longcat_tool_call>", is_list=False, break_="\n")),
    "xlam": Format("xLAM: a list of objects begins the answer, or a code block does", ObjectCalls, Objects()),
    "gemma4": Format("Gemma 4", QuotedCalls, Quoted("<|tool_call>", "<tool_call|>", '<|"|>')),
    "functiongemma": Format("FunctionGemma", QuotedCalls, Quoted(
        "<start_function_call>", "<end_function_call>", "<escape>")),
}
"""By the name of a parser, vLLM's where it has one."""

SIGNS: tuple[tuple[str, Signs], ...] = (
    (HARMONY, Signs(("<|channel|>", "<|message|>"))),
    ("muse", Signs(("atem:function_calls",))),
    ("gemma4", Signs(("<|tool_call>",))), ("functiongemma", Signs(("<start_function_call>",))),
    ("minimax_m3", Signs(("]<]minimax[>[",))), ("minimax_m2", Signs(("<minimax:tool_call>",))),
    ("deepseek_v4", Signs(("DSML", "'tool_calls>"))), ("deepseek_v32", Signs(("DSML",))),
    ("deepseek_v3", Signs(("<｜tool▁call▁begin｜>", "```json"))), ("deepseek_v31", Signs(("<｜tool▁call▁begin｜>",))),
    ("kimi_k3", Signs(("<|open|>", "<|close|>"))), ("kimi_k3", Signs(("open_tag(", "close_tag("))),
    ("kimi_k2", Signs(("<|tool_call_argument_begin|>",))), ("kimi_k2", Signs(("<|tool_calls_section_begin|>",))),
    ("kimi_k2", Signs(("<|im_system|>tool_declare",))),
    ("step3", Signs(("steptml:",))), ("solar", Signs(("<|tool_call:begin|>",))),
    ("seed_oss", Signs(("seed:tool_call",))),
    ("hy3", Signs(("tool_sep{}",))), ("glm45", Signs(("<arg_key>",))),
    ("minicpm5", Signs(("<function name=", "<param name="))),
    ("qwen3_xml", Signs(("<tool_call>", "<function=", "<parameter="))),
    ("granite", Signs(("<|tool_call|>", "available_tools"))), ("phi4_mini_json", Signs(("<|/tool|>",))),
    ("gigachat3", Signs(("<|function_call|>",))), ("gigachat3", Signs(("function call", "role_sep"))),
    ("internlm", Signs(("<|action_start|>",))), ("longcat", Signs(("<longcat_tool_call>",))),
    ("lfm2", Signs(("<|tool_call_start|>",))), ("lfm2", Signs(("List of tools: ",), ("<tool_call>",))),
    ("olmo3", Signs(("<function_calls>",))),
    ("nemotron", Signs(("<TOOLCALL>",))), ("cohere", Signs(("<|START_ACTION|>",))),
    ("command_r", Signs(("Action:", "tool_name"))), ("apertus", Signs(("<|tools_prefix|>",))),
    ("jamba", Signs(("<tool_calls>",))), ("xlam", Signs(("in a single JSON array",))),
    ("pythonic", Signs(("func_name1(",))),
    ("hermes", Signs(("<tool_call>", '"arguments"'), ("<function=",))),
    ("functionary_v32", Signs((">>>all",))),
    ("functionary_v31", Signs(("<function=", "</function>"), ("<parameter=",))),
    ("mistral", Signs(("[TOOL_CALLS]",))),
    ("llama3_json", Signs(("<|start_header_id|>", '"parameters"'), ("<tool_call>",))),
)
"""The first that holds tells a template's format."""

ALIASES = {  # vLLM's and SGLang's names, and what else a format is called
    "qwen3_coder": "qwen3_xml", "step3p5": "qwen3_xml", "nemotron_v3": "qwen3_xml", "mimo": "qwen3_xml",
    "qwen": "hermes", "qwen25": "hermes", "granite4": "hermes", "ernie45": "hermes",
    "llama3": "llama3_json", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "gpt-oss": HARMONY,
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45", "glm47": "glm45", "glm4_moe": "glm45", "poolside_v1": "glm45",
    "minimax": "jamba", "hunyuan_a13b": "jamba", "minimax-m2": "minimax_m2", "apriel": "jamba",
    "cohere2": "cohere", "cohere_command3": "cohere", "gigachat": "gigachat3", "hunyuan": "hy3",
}


def tool_parser_of(template: str) -> str:
    """The name of the parser for calls as a chat template writes them; "" if none is known."""
    for name, signs in SIGNS:
        if all(sign in template for sign in signs.all) and not any(other in template for other in signs.none):
            return name
    return ""
