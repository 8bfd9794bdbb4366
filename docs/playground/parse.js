"use strict";
// Masks written as text, as `tilewise.masks.parse` reads them, and three more (documents, blocks, selected) whose tensors are short
// enough to type. A small recursive descent: nothing is evaluated. tests/docs/test_playground.py holds it to the Python.
const MaskText = (() => {
  const UNBOUNDED = 2 ** 30; // a side of a band or range at this value, or its negative, is no limit
  const DEEPEST = 200;
  const ANCHORS = { bottom_right: "b", top_left: "t" };

  // What is wrong, where: `key` names the sentence in words.js, `values` fill its gaps.
  class MaskError extends Error {
    constructor(token, key, values = {}) {
      super(key + " " + JSON.stringify(values));
      Object.assign(this, { at: token.at, got: token.text, key, values });
    }
  }

  function tokens(text) {
    const found = [], pattern = /\s*(?:(-?[0-9]+)|([A-Za-z_]+)|([()&|~,=[\]]))/y;
    let at = 0;
    while (text.slice(at).trim()) {
      pattern.lastIndex = at;
      const match = pattern.exec(text);
      if (!match) {
        at += text.slice(at).length - text.slice(at).trimStart().length;
        const sign = String.fromCodePoint(text.codePointAt(at));
        throw new MaskError({ at, text: sign }, "character");
      }
      const [whole, number, name] = match, kind = number !== undefined ? "number" : name !== undefined ? "name" : "sign";
      const own = whole.trimStart();
      found.push({ kind, text: own, at: at + whole.length - own.length });
      at += whole.length;
    }
    return [...found, { kind: "end", text: "", at: text.length }];
  }

  // -- the makers: arguments to a leaf of the tree

  const isInteger = (value) => typeof value === "number";
  const isList = (value) => Array.isArray(value) && !value.pair && value.every(isInteger);

  function integer(token, name, value, least) {
    if (!isInteger(value)) throw new MaskError(token, "needs-integer", { name });
    if (value < least) throw new MaskError(token, "at-least", { name, least });
    if (value > UNBOUNDED) throw new MaskError(token, "at-most", { name, most: UNBOUNDED });
    return value;
  }

  function integers(token, name, value, least = -(2 ** 31)) {
    if (!isList(value)) throw new MaskError(token, "needs-list", { name });
    if (value.some((x) => x < -(2 ** 31) || x >= 2 ** 31)) throw new MaskError(token, "needs-32-bits", { name });
    if (value.some((x) => x < least)) throw new MaskError(token, "at-least", { name, least });
    return value;
  }

  function table(token, name, value) {
    const rows = Array.isArray(value) && !value.pair ? value : [];
    if (!rows.length || !rows.every(isList) || !rows[0].length || rows.some((row) => row.length !== rows[0].length))
      throw new MaskError(token, "needs-table", { name });
    rows.forEach((row) => integers(token, name, row));
    return rows;
  }

  function band(token, lo, hi, { align = "bottom_right", offset }) {
    if (!Object.hasOwn(ANCHORS, align)) throw new MaskError(token, "anchor", { names: Object.keys(ANCHORS).join(", ") });
    if (offset === undefined) return { leaf: "band", lo: Math.max(lo, -UNBOUNDED), hi: Math.min(hi, UNBOUNDED), letter: ANCHORS[align] };
    if (!isInteger(offset)) return { leaf: "offset", lo, hi, offsets: integers(token, "offset", offset) };
    integer(token, "offset", offset, 1 - UNBOUNDED);
    return { leaf: "band", lo: lo <= -UNBOUNDED ? lo : lo + offset, hi: hi >= UNBOUNDED ? hi : hi + offset, letter: "t" };
  }

  const listed = (value) => (isInteger(value) ? [value] : value); // one sequence may be written without brackets

  const MAKERS = {
    full: { names: [], make: () => ({ leaf: "full" }) },
    causal: { names: ["align", "offset"], make: (token, a) => band(token, -UNBOUNDED, 0, a) },
    window: {
      names: ["left", "right"], needs: ["left"], also: ["align", "offset"],
      make(token, a) {
        if (a.right === undefined) return band(token, 1 - integer(token, "left", a.left, 1), 0, a);
        return band(token, -integer(token, "left", a.left, 0), integer(token, "right", a.right, 0), a);
      },
    },
    prefix: {
      names: ["n"], needs: ["n"],
      make: (token, { n }) => (isInteger(n) ? { leaf: "range", start: 0, end: integer(token, "n", n, 0) }
        : { leaf: "ranges", lengths: integers(token, "n", n), maker: "prefix" }),
    },
    key_padding: {
      names: ["lengths", "start"], needs: ["lengths"],
      make(token, { lengths, start }) {
        const first = start === undefined ? undefined : integers(token, "start", listed(start));
        return { leaf: "ranges", lengths: integers(token, "lengths", listed(lengths)), start: first, maker: "key_padding" };
      },
    },
    documents: {
      names: ["lengths", "q_lengths"], needs: ["lengths"],
      make(token, a) {
        const queries = a.q_lengths === undefined ? undefined : integers(token, "q_lengths", listed(a.q_lengths), 1);
        return { leaf: "documents", lengths: integers(token, "lengths", listed(a.lengths), 1), queries };
      },
    },
    blocks: {
      names: ["table", "size"], needs: ["table", "size"], tables: true,
      make(token, { table: cells, size }) {
        const sides = size.pair ? size : [size, size];
        if (sides.length !== 2) throw new MaskError(token, "needs-pair", { name: "size" });
        const [sizeQ, sizeK] = sides.map((side) => integer(token, "size", side, 1));
        return { leaf: "blocks", table: table(token, "table", cells), sizeQ, sizeK };
      },
    },
    selected: {
      names: ["indices", "block", "per"], needs: ["indices"], tables: true,
      make(token, { indices, block = 128, per = 128 }) {
        const sizes = { sizeK: integer(token, "block", block, 1), sizeQ: integer(token, "per", per, 16) };
        return { leaf: "selected", lists: table(token, "indices", indices), ...sizes };
      },
    },
  };

  function make(token, values, options) {
    const { names, needs = [], also = [], make: maker } = MAKERS[token.text];
    if (values.length > names.length) throw new MaskError(token, "too-many", { count: names.length });
    const args = {};
    values.forEach((value, i) => { args[names[i]] = value; });
    for (const [name, value] of Object.entries(options)) {
      if (!names.includes(name) && !also.includes(name))
        throw new MaskError(token, "unknown-option", { name, names: [...names, ...also].join(", ") || "–" });
      if (name in args) throw new MaskError(token, "twice", { name });
      args[name] = value;
    }
    for (const name of needs) if (args[name] === undefined) throw new MaskError(token, "missing", { name });
    return { ...maker(token, args), token, args };
  }

  // -- the tree: leaves, {not}, {and: [left, right]}, {or: [left, right]}

  function join(kind, left, right) {
    if (left.leaf === "full" || right.leaf === "full") {
      const [full, other] = left.leaf === "full" ? [left, right] : [right, left];
      return kind === "and" ? other : full;
    }
    return { [kind]: [left, right] };
  }

  function parse(text) {
    const found = tokens(text);
    let next = 0, depth = 0;
    const peek = () => found[next];
    const advance = () => { const token = found[next]; if (token.kind !== "end") next++; return token; };
    const is = (sign) => peek().kind === "sign" && peek().text === sign;
    const accept = (sign) => { const there = is(sign); if (there) next++; return there; };
    const fail = (token, key, values) => { throw new MaskError(token, key, values); };
    const separator = (end) => { if (!is(end) && !accept(",")) fail(peek(), "separator", { end }); };

    function number(token) {
      if (token.kind !== "number") fail(token, "integer");
      if (token.text.length > 20) fail(token, "long-integer");
      return Number(token.text);
    }
    function list(end, tables) {
      const items = [];
      while (!accept(end)) {
        items.push(tables && end === "]" && accept("[") ? list("]", false) : number(advance()));
        separator(end);
      }
      return items;
    }
    function value(tables) {
      const token = advance();
      if (token.text === "[") return list("]", tables);
      if (tables && token.text === "(") return Object.assign(list(")"), { pair: true });
      if (token.kind !== "number" && token.kind !== "name") fail(token, "value");
      return token.kind === "number" ? number(token) : token.text;
    }
    function argument(values, options, tables) {
      const token = peek();
      if (token.kind === "number" || token.text === "[" || (tables && token.text === "(")) { values.push(value(tables)); return; }
      advance();
      let name, given = token.text;
      if (token.kind === "name" && Object.hasOwn(ANCHORS, token.text)) name = "align";
      else if (token.kind === "name" && accept("=")) { name = token.text; given = value(tables); }
      else fail(token, "argument");
      if (Object.hasOwn(options, name)) fail(token, "twice", { name });
      options[name] = given;
    }
    function unary() {
      if (++depth > DEEPEST) fail(peek(), "deep");
      try {
        if (accept("~")) { const part = unary(); return part.not || { not: part }; }
        if (accept("(")) {
          const mask = or();
          if (!accept(")")) fail(peek(), "sign", { sign: ")" });
          return mask;
        }
        const token = advance();
        if (token.kind !== "name" || !Object.hasOwn(MAKERS, token.text)) fail(token, "mask", { names: Object.keys(MAKERS).join(", ") });
        const values = [], options = Object.create(null), { tables } = MAKERS[token.text];
        if (accept("(")) while (!accept(")")) { argument(values, options, tables); separator(")"); }
        return make(token, values, options);
      } finally { depth--; }
    }
    function and() { let mask = unary(); while (accept("&")) mask = join("and", mask, unary()); return mask; }
    function or() { let mask = and(); while (accept("|")) mask = join("or", mask, and()); return mask; }

    const mask = or();
    if (peek().kind !== "end") fail(peek(), "operator");
    return mask;
  }

  // -- the same mask as a call of the library

  const lists = (value) => (Array.isArray(value) ? "[" + value.map(lists).join(", ") + "]" : String(value));
  function ids(lengths) { return "np.repeat(" + lists(lengths.map((_, i) => i)) + ", " + lists(lengths) + ")"; }

  function leafText({ token, args, leaf, ...mask }) {
    const { names } = MAKERS[token.text];
    let texts = Object.entries(args).map(([name, value]) => {
      const list = token.text === "key_padding" ? listed(value) : value;
      const text = name === "align" ? JSON.stringify(value) : lists(list);
      return name === names[0] && name !== "align" ? text : name + "=" + text;
    });
    if (leaf === "documents") texts = [ids(mask.lengths), ...(mask.queries ? ["q_ids=" + ids(mask.queries)] : [])];
    if (leaf === "blocks") texts = ["np.array(" + lists(mask.table) + ", bool)", mask.sizeQ === mask.sizeK ? mask.sizeQ : `(${mask.sizeQ}, ${mask.sizeK})`];
    if (leaf === "selected") texts[0] = "np.array(" + lists(mask.lists) + ")";
    return "tw." + token.text + "(" + texts.join(", ") + ")";
  }

  function python(mask, level = 0) {
    if (mask.or) { const text = mask.or.map((part) => python(part, 0)).join(" | "); return level > 0 ? "(" + text + ")" : text; }
    if (mask.and) { const text = mask.and.map((part) => python(part, 1)).join(" & "); return level > 1 ? "(" + text + ")" : text; }
    return mask.not ? "~" + python(mask.not, 2) : leafText(mask);
  }

  return { parse, python, MaskError, UNBOUNDED, MAKERS: Object.keys(MAKERS) };
})();
