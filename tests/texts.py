"""Short texts of unlike kinds (code, prose, maths, languages): evidence may not depend on what is written."""

import bisect
import csv
import difflib
import fractions
import heapq
import inspect
import json
import random
import re
import string
import textwrap
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

DOMAINS = ("code", "prose", "maths", "languages", "random ids")

_PROBLEMS = Path(__file__).resolve().parents[1] / "examples" / "word_problems.jsonl"
_MODULES: tuple[ModuleType, ...] = (bisect, csv, difflib, fractions, heapq, string, textwrap)
_LANGUAGES = (
    "Der Zug nach Lübeck fährt heute von Gleis sieben, weil an Gleis drei die Schienen erneuert werden. Wer umsteigen "
    "muss, hat nur vier Minuten Zeit und sollte am besten gleich vorne einsteigen.",
    "Au marché du samedi, la vieille dame vend du miel, des noix et trois sortes de fromage de chèvre. Elle connaît "
    "ses clients par leur nom et leur garde toujours le meilleur morceau.",
    "La biblioteca del barrio cierra los lunes, pero los demás días está llena de estudiantes que preparan sus "
    "exámenes y de jubilados que leen el periódico junto a la ventana.",
    "Il fiume era così basso quell'estate che si poteva attraversare a piedi, saltando da una pietra all'altra, senza "
    "bagnarsi nemmeno le scarpe.",
    "Na serra, o nevoeiro chega ao fim da tarde e apaga as casas uma a uma, até que só se ouvem os sinos das ovelhas "
    "que voltam para o curral.",
    "Zimą droga do szkoły prowadziła przez zamarznięte jezioro, a nauczyciel codziennie rano sprawdzał laską, czy lód "
    "jest jeszcze dość gruby.",
    "Kışın köye giden yol kapanır, ekmek kızakla taşınır ve çocuklar okula ancak kar küreyicisi geçtikten sonra "
    "gidebilir.",
    "Когда в доме погас свет, дети зажгли свечи и стали рассказывать друг другу истории, которых на самом деле никогда "
    "не было.",
    "Το καράβι άργησε δύο ώρες και στο λιμάνι όλοι περίμεναν κάτω από τη μικρή σκιά του φάρου, πίνοντας νερό και "
    "λέγοντας παλιές ιστορίες.",
    "في الصباح الباكر يفتح الخباز دكانه وتملأ رائحة الخبز الشارع كله، فيأتي الأطفال قبل المدرسة ليشتروا الكعك الساخن.",
    "सुबह की पहली बस में हमेशा वही लोग मिलते हैं: दूधवाला, दो नर्सें और एक बूढ़ा आदमी जो रोज़ अख़बार पढ़ते-पढ़ते सो जाता है।",
    "山の上の小さな駅には一日に三本しか列車が来ないが、駅長は毎朝ホームを掃き、花に水をやり、時計を合わせる。",
    "村口有一棵老槐树，夏天的晚上大家都搬着凳子到树下乘凉，老人讲故事，孩子们追着萤火虫跑来跑去。",
    "겨울이 오면 할머니는 마당에 항아리를 묻고 김치를 담그셨고, 우리는 눈이 쌓인 장독대 위에 작은 눈사람을 만들었다.",
    "Kapal nelayan itu pulang sebelum fajar, dan di pantai para perempuan sudah menunggu dengan keranjang kosong dan "
    "lampu minyak yang kecil.",
    "Järven jää lauloi koko yön, ja aamulla rannassa oli pitkä halkeama, jonka yli lapset hyppivät kilpaa ennen "
    "koulukyydin tuloa.",
)


def texts(domain: str) -> list[str]:
    """At least 100 characters each; always in the same order. Not for `random ids`, which are no text."""
    if domain == "code":
        return [_cut(source) for module in _MODULES for source in _functions(module)]
    if domain == "prose":
        return [_cut(text) for _, text in sorted(topics.items())]
    if domain == "maths":
        lines = _PROBLEMS.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines]
    if domain == "languages":
        return list(_LANGUAGES)
    raise ValueError(f"{domain!r} is no domain with texts: expected one of {', '.join(DOMAINS[:-1])}")


def chosen(domain: str, count: int, seed: int) -> list[str]:
    """`count` texts of a domain, drawn with the seed; a domain with fewer texts gives some of them twice, cut later."""
    found = texts(domain)
    order = random.Random(f"{domain}-{seed}").sample(range(len(found)), len(found))
    return [_later(found[order[i % len(order)]], i // len(order)) for i in range(count)]


def random_ids(count: int, length: int, vocab_size: int, seed: int, *, special: int = 3) -> list[list[int]]:
    """`count` sequences of ids, none of the first `special` ones."""
    numbers = random.Random(f"ids-{seed}")
    return [[numbers.randrange(special, vocab_size) for _ in range(length)] for _ in range(count)]


def _functions(module: ModuleType) -> list[str]:
    """The functions and methods of a module, each from its `def` to the next one."""
    parts = re.split(r"\n(?= *def )", inspect.getsource(module))
    return [part for part in parts[1:] if len(part) > 100]


def _cut(text: str, most: int = 600) -> str:
    return text[:most]


def _later(text: str, times: int) -> str:
    """The text from a later place on, so that no two prompts of a dump are the same."""
    return text[times * 7 :]
