"""The paper's eight tasks: where each comes from, how a published row becomes source and target, and the paper's figures.

Every function takes a row in any of the forms that the dataset is published in; `docs/tasks.md` names them
and says what was chosen where the paper is silent. Files are at commits of the Hub, and are Parquet or JSON.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

from calibeam.paper.metrics import Properties
from calibeam.tasks.task import UNSPLIT, Paper, Row, Task


def columns(source: str, target: str) -> Callable[[Row, str], Iterator[Row]]:
    """Rows of one source and one target."""
    return lambda row, split: iter([{"id": row.get("id"), "source": row[source], "target": row[target]}])


def reddit_tifu_long(row: Row, split: str) -> Iterator[Row]:
    """The posts that have a "tl;dr". Rows of the Hub's own conversion have no id and other names."""
    source = row["documents" if "documents" in row else "selftext_without_tldr"].strip()
    target = (row["tldr"] or "").strip()
    if source and target:
        name = row.get("id") or hashlib.sha256(f"{source}\0{target}".encode()).hexdigest()[:16]
        yield {"id": name, "group": name, "source": source, "target": target}


def squad_documents(row: Row) -> Iterator[Row]:
    """The questions of SQuAD's document, or of one of Du et al.'s articles, as the Hub has them."""
    if not {"data", "paragraphs"} & row.keys():
        yield row
        return
    for article in row.get("data", [row]):
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                texts = {"text": [answer["text"] for answer in question["answers"]]}
                yield {**question, "answers": texts, "title": article["title"], "context": paragraph["context"]}


def squad_qg(row: Row, split: str) -> Iterator[Row]:
    """A question of SQuAD, or of lmqg/qg_squad, which has one answer in other words."""
    answer = row["answer"] if "answer" in row else row["answers"]["text"][0]
    context = row["paragraph" if "paragraph" in row else "context"]
    source = f"answer: {answer} context: {context}"
    yield {"id": row.get("id"), "group": row.get("title"), "source": source, "target": row["question"]}


def msmarco_documents(row: Row) -> Iterator[Row]:
    """MS MARCO's own document is an object of columns."""
    if not isinstance(row.get("query"), dict):
        yield row
        return
    for key in row["query"]:
        yield {name: column[key] for name, column in row.items() if key in column}


def msmarco_nlg(row: Row, split: str) -> Iterator[Row]:
    """The queries that have a well-formed answer; where there is none, MS MARCO writes an empty list, or "[]"."""
    answers = row["wellFormedAnswers"]
    if answers and answers != "[]":
        passages = row["passages"]
        texts = passages["passage_text"] if isinstance(passages, dict) else [passage["passage_text"] for passage in passages]
        yield {"id": row["query_id"], "source": f"question: {row['query']} context: {' '.join(texts)}", "target": answers}


def webnlg_documents(row: Row) -> Iterator[Row]:
    """GEM's own document has all rows in `values`."""
    yield from row.get("values", [row])


def webnlg_en(row: Row, split: str) -> Iterator[Row]:
    references = row["target"] if isinstance(row["target"], list) else _references(row)
    yield from _pairs_or_references(row.get("gem_id"), " && ".join(row["input"]), references, split)


def commongen(row: Row, split: str) -> Iterator[Row]:
    """CommonGen's lines, or GEM's rows."""
    concepts = row["concept_set"].split("#") if "concept_set" in row else row["concepts"]
    references = row.get("scene", []) if "concept_set" in row else _references(row)
    yield from _pairs_or_references(row.get("gem_id"), ", ".join(concepts), references, split)


def _references(row: Row) -> list[str]:
    return row["references"] or ([row["target"]] if row["target"] else [])


def _pairs_or_references(name: str | None, source: str, references: Sequence[str], split: str) -> Iterator[Row]:
    """To train on, every pair of source and reference is a row, as GEM counts them; elsewhere references stay together."""
    if split == "train":
        for reference in references:
            yield {"id": name, "source": source, "target": reference}
    else:
        yield {"id": name, "source": source, "target": list(references)}


CNN_DAILYMAIL = Task(
    name="cnn_dailymail",
    about="CNN/DailyMail: news articles and their highlights",
    fields="id, article, highlights",
    source="the article",
    max_source_length=1024,
    max_target_length=128,
    metric="rouge",
    hub="hf://datasets/abisee/cnn_dailymail@96df5e686bee6baa90b8bee7c28b81fa3fa6223d",
    files={split: f"3.0.0/{split}-*.parquet" for split in ("train", "validation", "test")},
    rows=columns("article", "highlights"),
    paper=Paper(
        examples="287K / 13K / 11K",
        properties=Properties(698.60, 49.53, 0.878, 3.77),
        finetuned=(44.31, 21.91, 41.41),
        calibrated=(47.97, 24.18, 44.88),
        learning_rate=1e-5,
    ),
)

XSUM = Task(
    name="xsum",
    about="XSUM: BBC articles and their first sentence",
    fields="id, document, summary",
    source="the article without its first sentence",
    max_source_length=1024,
    max_target_length=64,
    metric="rouge",
    hub="hf://datasets/EdinburghNLP/xsum@5484b3547a597693f9c099954c1cd6a8192a4573",
    files={split: f"default/xsum-{split}.parquet" for split in ("train", "validation", "test")},
    rows=columns("document", "summary"),
    paper=Paper(
        examples="203K / 11K / 11K",
        properties=Properties(383.17, 21.74, 0.639, 1.06),
        finetuned=(49.57, 26.77, 41.41),
        calibrated=(49.77, 27.09, 42.08),
        learning_rate=1e-5,
    ),
)

REDDIT_TIFU_LONG = Task(
    name="reddit_tifu_long",
    about="RedditTIFU-long: posts and their tl;dr",
    fields="id, selftext_without_tldr, tldr",
    source="the post without its tl;dr",
    max_source_length=1024,
    max_target_length=128,
    metric="rouge",
    hub="hf://datasets/ctr4si/reddit_tifu@19bd22e0d72e279f4ca3882715147a39e4c56141",
    files={UNSPLIT: "data/tifu_all_tokenized_and_filtered.json.gz"},
    rows=reddit_tifu_long,
    split_lists="reddit_tifu_long_splits.json",
    paper=Paper(
        examples="34K / 4K / 4K",
        properties=Properties(396.15, 21.02, 0.684, 1.27),
        finetuned=(28.73, 10.12, 23.24),
        calibrated=(32.03, 11.13, 25.51),
        learning_rate=1e-5,
    ),
)

SAMSUM = Task(
    name="samsum",
    about="SAMSum: chat dialogues and their summaries",
    fields="id, dialogue, summary",
    source="the dialogue",
    max_source_length=512,
    max_target_length=128,
    metric="rouge",
    hub="hf://datasets/knkarthick/samsum@e9ef8bf7a22f79c4283578810e687adbeb2dfecc",
    files={split: f"default/{split}/*.parquet" for split in ("train", "validation", "test")},
    rows=columns("dialogue", "summary"),
    paper=Paper(
        examples="14,732 / 818 / 819",
        properties=Properties(97.23, 21.00, 0.680, 1.46),
        finetuned=(53.64, 29.21, 44.83),
        calibrated=(54.37, 29.88, 45.89),
        learning_rate=1e-6,
    ),
)

SQUAD_QG = Task(
    name="squad_qg",
    about="SQuAD question generation, in the split of Du et al. (2017)",
    fields="answer, paragraph, question",
    source="answer: ANSWER context: PARAGRAPH",
    max_source_length=512,
    max_target_length=64,
    metric="squad_qg",
    hub="hf://datasets/lmqg/qg_squad@78eb93ceeb84b6995052c5e702438793761120a0",
    files={
        "train": "data/processed/train*.jsonl",
        "validation": "data/processed/dev*.jsonl",
        "test": "data/processed/test*.jsonl",
    },
    documents=squad_documents,
    rows=squad_qg,
    split_lists="doclist-*.txt",
    paper=Paper(
        examples="76K / 11K / 12K",
        properties=Properties(128.72, 10.24, 0.647, 1.63),
        finetuned=(None, None, 52.59),
        calibrated=(None, None, 53.28),
        learning_rate=1e-5,
    ),
)

MSMARCO_NLG = Task(
    name="msmarco_nlg",
    about="MSMARCO NLG: well-formed answers to queries, given passages",
    fields="query_id, query, passages, wellFormedAnswers",
    source="question: QUERY context: PASSAGES",
    max_source_length=1024,
    max_target_length=64,
    metric="msmarco",
    hub="hf://datasets/microsoft/ms_marco@a47ee7aae8d7d466ba15f9f0bfac3b3681087b3a",
    files={split: f"v2.1/{split}-*.parquet" for split in ("train", "validation")},
    documents=msmarco_documents,
    rows=msmarco_nlg,
    paper=Paper(
        examples="152K / 12K / 12K",
        properties=Properties(588.50, 14.07, 0.975, 7.78),
        finetuned=(None, None, 70.73),
        calibrated=(None, None, 71.06),
        learning_rate=3e-6,
        reported_on="validation",
    ),
)

WEBNLG_EN = Task(
    name="webnlg_en",
    about="WebNLG-en of GEM: RDF triples in words",
    fields="gem_id, input, target, references",
    source="SUBJECT | PROPERTY | OBJECT && ...",
    max_source_length=256,
    max_target_length=128,
    metric="gem",
    hub="hf://datasets/GEM/gem@d8c1b4918abba96ba45c306a64efeb3a73723a52",
    files={split: f"web_nlg_en/{split}/*.parquet" for split in ("train", "validation", "test")},
    documents=webnlg_documents,
    rows=webnlg_en,
    paper=Paper(
        examples="35K / 1667 / 1779",
        properties=Properties(17.50, 20.51, 0.487, 1.3),
        finetuned=(76.96, 52.97, 62.56),
        calibrated=(78.09, 55.52, 65.06),
        learning_rate=1e-6,
    ),
)

COMMONGEN = Task(
    name="commongen",
    about="CommonGen of GEM: a sentence that uses given concepts",
    fields="gem_id, concepts, target, references",
    source="CONCEPT, CONCEPT, ...",
    max_source_length=64,
    max_target_length=64,
    metric="gem",
    hub="hf://datasets/GEM/common_gen@62063f847b090959b6fd342f9c8582f61a6bbb53",
    files={split: f"default/{split}/*.parquet" for split in ("train", "validation", "test")},
    rows=commongen,
    paper=Paper(
        examples="67K / 993 / 1497",
        properties=Properties(3.27, 10.10, 0.220, 0.22),
        finetuned=(66.49, 36.17, 58.82),
        calibrated=(68.95, 38.49, 60.13),
        learning_rate=1e-5,
        reported_on="validation",
    ),
)

PAPER_TASKS = (CNN_DAILYMAIL, XSUM, REDDIT_TIFU_LONG, SAMSUM, SQUAD_QG, MSMARCO_NLG, WEBNLG_EN, COMMONGEN)
