"""Text that has broken pages, terminals, spreadsheets and parsers. A dialog from any of these calls alert."""

from __future__ import annotations

RUN = "alert(document.domain)"
MARKUP = [
    f"</script><script>{RUN}</script>",
    f"</SCRIPT ><ScRiPt>{RUN}</sCrIpT>",
    f"--></script><script>{RUN}//",
    f"<!--<script>{RUN}</script>-->",
    f"]]><script>{RUN}</script>",
    f"</style><script>{RUN}</script>",
    f"</title><script>{RUN}</script>",
    f"</textarea><script>{RUN}</script>",
    f"</noscript><script>{RUN}</script>",
    f"<script src=data:text/javascript,{RUN}></script>",
    f"<script>{RUN}",
    f"<<script>{RUN}//<</script>",
    f"<img src=x onerror={RUN}>",
    f"<img src=x onerror='{RUN}'//",
    f'"><img src=x onerror={RUN}>',
    f"'><svg/onload={RUN}>",
    f'"><svg onload={RUN}>',
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}>",
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>",
    f"<input autofocus onfocus={RUN}>",
    f"<video><source onerror={RUN}></video>",
    f"<marquee onstart={RUN}>",
    f'" autofocus onfocus="{RUN}',
    f"' onmouseover='{RUN}",
    f"` onmouseover={RUN} x=`",
    f"<iframe srcdoc='<script>{RUN}</script>'></iframe>",
    f"<iframe src=javascript:{RUN}>",
    f"<object data='javascript:{RUN}'></object>",
    f"<embed src=javascript:{RUN}>",
    f"<a href='javascript:{RUN}'>here</a>",
    f"<form action=javascript:{RUN}><button>here</button></form>",
    f"<base href='javascript:{RUN}//'>",
    f"<meta http-equiv=refresh content='0;url=javascript:{RUN}'>",
    "<link rel=stylesheet href='data:text/css,*{display:none}'>",
    "<style>*{display:none}</style>",
    f"<template><script>{RUN}</script></template>",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    f"&#60;script&#62;{RUN}&#60;/script&#62;",
    f"%3Cscript%3E{RUN}%3C/script%3E",
    f"\\u003cscript\\u003e{RUN}\\u003c/script\\u003e",
    f"+ADw-script+AD4-{RUN}+ADw-/script+AD4-",
]
ADDRESSES = [f"javascript:{RUN}", f"JaVaScRiPt:{RUN}", f"data:text/html,<script>{RUN}</script>", f"vbscript:{RUN}"]
TEMPLATES = [
    "{{ 7 * 7 }}{% raw %}",
    "{{ config.__class__.__init__.__globals__ }}",
    "${7*7}",
    "#{7*7}",
    f"${{{RUN}}}",
    f"`${{{RUN}}}`",
    f"{{{{constructor.constructor('{RUN}')()}}}}",
    f"');{RUN};//",
    f'");{RUN};//',
    f"datum.x = {RUN}",
    '{"signal": "warn(1)"}',
    "__proto__",
    "constructor",
    "%s%n%d{0}{x}",
    "[bold red]not markup[/] [link=file:///]x[/link]",
]
FORMULAS = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1+1)*cmd|' /C calc'!A0", '=HYPERLINK("x","y")']
UNICODE = [
    "line\u2028separator\u2029paragraph",
    "bidi \u202eecnelis\u202c \u2066isolate\u2069 \u200f",
    "zero\u200bwidth\ufeffspace\u2060joiner",
    "ﷺ 日本語 😀👩‍👩‍👧‍👦 e\u0301\u0301\u0301",
    "z̷̡̛a̵͜l̶g̴o̸" * 20,
    "W" * 20_000,
    "a b " * 5_000,
]
CONTROLS = ["nul\x00byte", "\x1b[31mred\x1b]0;title\x07\x1b[2J", "bell\x07 back\x08 \x7f \x9b31m", "\ufffe\uffff\U0010ffff"]
NOT_UNICODE = ["lone \ud800 high", "lone \udc80 low"]

FOR_FILES = [*MARKUP, *ADDRESSES, *TEMPLATES, *FORMULAS, *UNICODE, *CONTROLS]
"""What a dataset can hold."""
HOSTILE = [*FOR_FILES, *NOT_UNICODE]
