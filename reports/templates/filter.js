"use strict";
// Which cases are shown. No document here: the same text runs in the page and in the tests.
//
// compile(expression)  the -k of the command line: words, and, or, not, parentheses
// choose(index, wish)  which cases a wish selects, and how many each outcome would add
const compile = (expression) => {
  const tokens = expression.match(/[()]|[^\s()]+/g) || [];
  const operators = ["and", "or", "not", "(", ")"];
  let at = 0;
  let depth = 0;
  const several = (part, word, join) => {
    const parts = [part()];
    while (tokens[at] === word) {
      at += 1;
      parts.push(part());
    }
    return parts.length === 1 ? parts[0] : join(parts);
  };
  const any = () => several(all, "or", (parts) => (text) => parts.some((part) => part(text)));
  const all = () => several(one, "and", (parts) => (text) => parts.every((part) => part(text)));
  const one = () => {
    depth += 1;
    if (depth > 50) throw new Error("expected at most 50 levels, got deeper nesting");
    const found = single();
    depth -= 1;
    return found;
  };
  const single = () => {
    const token = tokens[at];
    at += 1;
    if (token === "not") {
      const inner = one();
      return (text) => !inner(text);
    }
    if (token === "(") {
      const inner = any();
      if (tokens[at] !== ")") throw new Error("expected a closing parenthesis, got the end");
      at += 1;
      return inner;
    }
    if (token === undefined || operators.includes(token)) {
      throw new Error("expected a word, not or (, got " + (token || "the end"));
    }
    const word = token.toLowerCase();
    return (text) => text.includes(word);
  };
  const predicate = any();
  if (at < tokens.length) throw new Error("expected and, or, or the end, got " + tokens[at]);
  return predicate;
};

// index: {outcomes, axes: [[name, [value, ...]], ...], cases: [[id, outcome, cause, [value, ...]], ...]}
// where outcome, cause and values are places in their lists, -1 for none.
const known = (index) => index.cases.map(([id, , , values]) =>
  [id, ...values.map((value, axis) => value < 0 ? "" : index.axes[axis][0] + "=" + index.axes[axis][1][value])]
    .filter(Boolean).join("\n").toLowerCase());

// wish: {words, outcomes: [place, ...] (none is all), axes: {axis: value}, cause}
const choose = (index, texts, wish) => {
  const matches = wish.words.trim() ? compile(wish.words) : () => true;
  const axes = Object.entries(wish.axes);
  const shown = [];
  const counts = index.outcomes.map(() => 0);
  index.cases.forEach(([, outcome, cause, values], place) => {
    const fits = axes.every(([axis, value]) => values[axis] === value)
      && (wish.cause < 0 || cause === wish.cause) && matches(texts[place]);
    if (fits) counts[outcome] += 1;
    shown.push(fits && (!wish.outcomes.length || wish.outcomes.includes(outcome)));
  });
  return { shown, counts };
};

// The place in the address: "#?k=dp2&o=failed&graph=%5Battn%5D" is a wish, "#case" is a case.
const written = (index, wish) => {
  const parts = [];
  const say = (name, value) => parts.push(encodeURIComponent(name) + "=" + encodeURIComponent(value));
  if (wish.words.trim()) say("k", wish.words.trim());
  if (wish.outcomes.length) say("o", wish.outcomes.map((place) => index.outcomes[place]).join(" "));
  if (wish.cause >= 0) say("cause", wish.cause);
  for (const [axis, value] of Object.entries(wish.axes)) say("axis." + index.axes[axis][0], index.axes[axis][1][value]);
  return parts.length ? "#?" + parts.join("&") : "";
};

const read = (index, fragment) => {
  const wish = { words: "", outcomes: [], axes: {}, cause: -1 };
  if (!fragment.startsWith("#?")) return wish;
  for (const part of fragment.slice(2).split("&")) {
    let name, value;
    try {
      [name, value] = [part.split("=")[0], part.split("=").slice(1).join("=")].map(decodeURIComponent);
    } catch (error) {
      continue;
    }
    if (name === "k") wish.words = value;
    if (name === "o") wish.outcomes = value.split(" ").map((word) => index.outcomes.indexOf(word)).filter((place) => place >= 0);
    if (name === "cause" && /^\d+$/.test(value)) wish.cause = Number(value);
    index.axes.forEach(([axis, values], place) => {
      if (name === "axis." + axis && values.includes(value)) wish.axes[place] = values.indexOf(value);
    });
  }
  return wish;
};
