"""A hundred prompts of different kinds and lengths, made from ten forms and ten subjects."""
FORMS = (
    "What is {}?",
    "Write one sentence about {}.",
    "Explain {} to a child of ten, with an example from daily life.",
    "List three facts about {} and say which one surprises people most:\n1.",
    "Q: Who should learn about {} first, and why?\nA:",
    "Once upon a time, an old teacher talked about {} to a class that would not listen. \"",
    "Translate into French: I know little about {}, but I would like to learn more before the end of the year.",
    "def describe_{}():\n    \"\"\"Return a short text.\"\"\"\n    return",
    "The history of {} begins long before anyone wrote it down. In the first chapter we look at the oldest sources, in the second at how they were copied, and in the third",
    "{}",
)
SUBJECTS = ("the moon", "bread", "the French Revolution", "prime numbers", "honey bees", "a bicycle", "the colour blue", "photosynthesis", "chess", "the Pacific Ocean")
PROMPTS = [f.format(s.replace(" ", "_") if "def " in f else s) for s in SUBJECTS for f in FORMS]
