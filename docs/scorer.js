// Sphinx's own scores, but what is about the inside comes after what users read.
var Scorer = {
  score: ([page, , , , score]) => (page.startsWith("inside/") ? score - 1000 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
