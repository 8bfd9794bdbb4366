"use strict";
// The tiles of a mask, as `tilewise.masks` classifies them: lowered to a union of conjunctions, bands and ranges intersected in closed
// form, the other literals each for itself, AND the minimum and OR the maximum. 0, 1 and 2 are EMPTY, PARTIAL and FULL.
const MaskTiles = (() => {
  const { UNBOUNDED, MaskError } = MaskText;
  const MAX_TERMS = 32;
  const LIMIT = UNBOUNDED - 1;
  const clip = (x) => Math.max(-LIMIT, Math.min(LIMIT, x));
  const ceil = (a, b) => Math.ceil(a / b);
  const sum = (values) => values.reduce((a, b) => a + b, 0);

  // -- lowering: a mask and lengths to terms of literals {kind, lo, hi, …}; the letters are those of tilewise.masks.program

  function perSequence(mask, name, values, shape) {
    if (values.length !== 1 && values.length !== shape.batch)
      throw new MaskError(mask.token, "each-sequence", { name, count: values.length, batch: shape.batch });
    return values.map(clip);
  }

  function bandPairs(lo, hi, negate) {
    if (!negate) return [[lo, hi]];
    return [...(lo > -UNBOUNDED ? [[-UNBOUNDED, lo - 1]] : []), ...(hi < UNBOUNDED ? [[hi + 1, UNBOUNDED]] : [])];
  }

  // The first position of each document, and the end of the last.
  function edgesOf(mask, name, lengths, length) {
    const edges = [0];
    for (const one of lengths) edges.push(edges[edges.length - 1] + one);
    if (edges[edges.length - 1] !== length)
      throw new MaskError(mask.token, "documents-sum", { name, sum: edges[edges.length - 1], length });
    return edges;
  }

  const LEAVES = {
    full: (mask, shape, negate) => (negate ? [] : [[]]),
    band: (mask, shape, negate) => bandPairs(mask.lo, mask.hi, negate).map(([lo, hi]) => [{ kind: mask.letter, lo, hi, tensors: 0 }]),
    offset(mask, shape, negate) {
      const offsets = perSequence(mask, "offset", mask.offsets, shape);
      return bandPairs(mask.lo, mask.hi, negate).map(([lo, hi]) => [{ kind: "o", lo, hi, offsets, tensors: 1 }]);
    },
    range({ start, end }, shape, negate) {
      const pairs = negate ? [[-UNBOUNDED, start], [end, UNBOUNDED]] : [[start, end]];
      return pairs.map(([lo, hi]) => [{ kind: "r", lo, hi, tensors: 0 }]);
    },
    ranges(mask, shape, negate) {
      const lengths = perSequence(mask, "lengths", mask.lengths, shape);
      const start = mask.start ? perSequence(mask, "start", mask.start, shape) : [0];
      const count = Math.max(lengths.length, start.length), of = (list, b) => list[list.length > 1 ? b : 0];
      const sides = Array.from({ length: count }, (_, b) => [of(start, b), of(start, b) + of(lengths, b)]);
      const pairs = negate ? [sides.map(([first]) => [0, first]), sides.map(([, past]) => [past, UNBOUNDED])] : [sides];
      return pairs.map((ends) => [{ kind: "k", ends, tensors: 2 }]);
    },
    documents(mask, { queries, keys }, negate) {
      if (!mask.queries && queries !== keys) throw new MaskError(mask.token, "documents-queries", { queries, keys });
      const k = edgesOf(mask, "lengths", mask.lengths, keys), q = mask.queries ? edgesOf(mask, "q_lengths", mask.queries, queries) : k;
      return [[{ kind: "d", negate, q, k, tensors: 2 }]];
    },
    blocks({ token, table, sizeQ, sizeK }, { queries, keys }, negate) {
      const want = [ceil(queries, sizeQ), ceil(keys, sizeK)];
      if (table.length !== want[0] || table[0].length !== want[1])
        throw new MaskError(token, "blocks-shape", { rows: table.length, cols: table[0].length, wantRows: want[0], wantCols: want[1] });
      return [[{ kind: "s", negate, table, sizeQ, sizeK, tensors: 1 }]];
    },
    selected({ token, lists, sizeQ, sizeK }, { queries }, negate) {
      const want = ceil(queries, sizeQ);
      if (lists.length !== want) throw new MaskError(token, "selected-shape", { rows: lists.length, wantRows: want, per: sizeQ });
      return [[{ kind: "i", negate, lists, sizeQ, sizeK, tensors: 1 }]];
    },
  };

  function terms(mask, shape, negate) {
    if (mask.leaf) return LEAVES[mask.leaf](mask, shape, negate);
    if (mask.not) return terms(mask.not, shape, !negate);
    const [left, right] = (mask.and || mask.or).map((part) => terms(part, shape, negate));
    const both = Boolean(mask.and) !== negate; // De Morgan
    const found = both ? left.flatMap((a) => right.map((b) => [...a, ...b])) : [...left, ...right];
    if (found.length > MAX_TERMS) throw new MaskError({ at: 0, text: "" }, "terms", { count: found.length, most: MAX_TERMS });
    return found;
  }

  // Static bands and ranges of a kind become one; null if they hold nowhere.
  function mergeTerm(term) {
    const merged = new Map(), rest = [];
    for (const literal of term) {
      const old = merged.get(literal.kind);
      if (!"btr".includes(literal.kind)) rest.push(literal);
      else merged.set(literal.kind, old ? { ...old, lo: Math.max(old.lo, literal.lo), hi: Math.min(old.hi, literal.hi) } : literal);
    }
    for (const { kind, lo, hi } of merged.values()) if (lo > hi || (kind === "r" && lo === hi)) return null;
    return [...rest, ...[...merged.values()].filter(({ lo, hi }) => lo !== -UNBOUNDED || hi !== UNBOUNDED)];
  }

  // {terms, shape}: no term is nothing, a term without literals everything.
  function lower(mask, shape) {
    const found = terms(mask, shape, false).map(mergeTerm).filter((term) => term !== null);
    return { shape, terms: found.some((term) => !term.length) ? [[]] : found };
  }

  const literals = (program) => program.terms.flat();
  const perBatch = (program) => literals(program).some(({ offsets, ends }) => (offsets || ends || []).length > 1);

  // -- bands and ranges: lo <= k - q <= hi and start <= k < end

  function interval(term, { queries, keys }, b) {
    let lo = -UNBOUNDED, hi = UNBOUNDED, start = 0, end = keys;
    for (const literal of term) {
      const { kind } = literal;
      if ("bto".includes(kind)) {
        const own = kind === "o" ? literal.offsets[literal.offsets.length > 1 ? b : 0] : kind === "b" ? keys - queries : 0;
        lo = Math.max(lo, literal.lo > -UNBOUNDED ? literal.lo + own : -UNBOUNDED);
        hi = Math.min(hi, literal.hi < UNBOUNDED ? literal.hi + own : UNBOUNDED);
      } else if (kind === "r" || kind === "k") {
        const [first, past] = kind === "r" ? [literal.lo, literal.hi] : literal.ends[literal.ends.length > 1 ? b : 0];
        start = Math.max(start, first);
        end = Math.min(end, past);
      }
    }
    return { lo, hi, start, end };
  }

  // [first, past) of the key tiles that the query tile from `at` visits, or (full) in which everything is visible.
  function visits({ lo, hi, start, end }, { queries, keys }, blockQ, blockK, at, full) {
    if (lo > hi || start >= end) return [0, 0];
    const to = Math.min(at + blockQ, queries);
    if (full) {
      const past = Math.min(at + hi + 1, end);
      return [Math.ceil(Math.max(to - 1 + lo, start) / blockK), past >= keys ? ceil(keys, blockK) : Math.floor(past / blockK)];
    }
    const first = Math.max(at + lo, start), past = Math.min(to + hi, end);
    return [Math.floor(first / blockK), first < past ? ceil(past, blockK) : 0];
  }

  // -- literals that read data: each gives (row, column) of tiles its class

  const lengthsOf = (length, block) => Array.from({ length: ceil(length, block) }, (_, i) => Math.min(block, length - i * block));

  function documentOf(edges, position) {
    let low = 0, high = edges.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (edges[middle] <= position) low = middle; else high = middle; }
    return low;
  }

  function documentClasses({ q, k }, { queries, keys }, blockQ, blockK) {
    const spans = (edges, length, block) => lengthsOf(length, block).map((own, i) => [documentOf(edges, i * block), documentOf(edges, i * block + own - 1)]);
    const rows = spans(q, queries, blockQ), cols = spans(k, keys, blockK);
    return (i, j) => {
      const [a, b] = rows[i], [c, d] = cols[j];
      return a > d || c > b ? 0 : a === b && c === d ? 2 : 1;
    };
  }

  function blockClasses({ table, sizeQ, sizeK }, { queries, keys }, blockQ, blockK) {
    const sums = [new Array(table[0].length + 1).fill(0)];
    table.forEach((row, r) => { const line = [0]; row.forEach((cell, c) => line.push(line[c] + sums[r][c + 1] - sums[r][c] + (cell ? 1 : 0))); sums.push(line); });
    const met = (length, block, size) => lengthsOf(length, block).map((own, i) => [Math.floor((i * block) / size), Math.floor((i * block + own - 1) / size) + 1]);
    const rows = met(queries, blockQ, sizeQ), cols = met(keys, blockK, sizeK);
    return (i, j) => {
      const [a, b] = rows[i], [c, d] = cols[j], count = sums[b][d] - sums[a][d] - sums[b][c] + sums[a][c];
      return count === 0 ? 0 : count === (b - a) * (d - c) ? 2 : 1;
    };
  }

  const named = (list, blocks) => [...new Set(list)].filter((x) => x >= 0 && x < blocks).sort((a, b) => a - b);

  function selectedClasses({ lists, sizeQ, sizeK }, { queries, keys }, blockQ, blockK) {
    const widths = lengthsOf(keys, blockK), cols = widths.length;
    const covered = lists.map((list) => {
      const line = new Float64Array(cols);
      for (const block of named(list, ceil(keys, sizeK))) {
        let begin = block * sizeK;
        for (const end = Math.min(begin + sizeK, keys); begin < end;) {
          const tile = Math.floor(begin / blockK), stop = Math.min(end, (tile + 1) * blockK);
          line[tile] += stop - begin;
          begin = stop;
        }
      }
      return line;
    });
    const rows = lengthsOf(queries, blockQ).map((own, i) => [Math.floor((i * blockQ) / sizeQ), Math.floor((i * blockQ + own - 1) / sizeQ) + 1]);
    return (i, j) => {
      const own = covered.slice(...rows[i]).map((line) => line[j]);
      return own.every((n) => n === 0) ? 0 : own.every((n) => n === widths[j]) ? 2 : 1;
    };
  }

  const READERS = { d: documentClasses, s: blockClasses, i: selectedClasses };

  // The classes of one sequence: {rows, cols, classes}, row by row.
  function classify(program, blockQ, blockK, b = 0) {
    const { shape } = program, rows = ceil(shape.queries, blockQ), cols = ceil(shape.keys, blockK);
    const classes = new Uint8Array(rows * cols);
    for (const term of program.terms) {
      const own = interval(term, shape, b);
      const data = term.filter(({ kind }) => READERS[kind]).map((literal) => [READERS[literal.kind](literal, shape, blockQ, blockK), literal.negate]);
      for (let i = 0; i < rows; i++) {
        const [first, past] = visits(own, shape, blockQ, blockK, i * blockQ, false);
        const [fullFirst, fullPast] = visits(own, shape, blockQ, blockK, i * blockQ, true);
        for (let j = first; j < past; j++) {
          let kind = j >= fullFirst && j < fullPast ? 2 : 1;
          for (const [read, negate] of data) kind = Math.min(kind, negate ? 2 - read(i, j) : read(i, j));
          const at = i * cols + j;
          if (kind > classes[at]) classes[at] = kind;
        }
      }
    }
    return { rows, cols, classes };
  }

  // -- visible pairs: for each row the keys it sees, as intervals

  const lineOf = (literal, q) => (literal.kind === "d" ? documentOf(literal.q, q) : Math.floor(q / literal.sizeQ)); // its document or block
  function lineSpans({ kind, k, table, lists, sizeK }, line, keys) {
    if (kind === "d") return line + 1 < k.length ? [[k[line], k[line + 1]]] : [];
    const own = kind === "s" ? table[line].flatMap((cell, c) => (cell ? [c] : [])) : named(lists[line], ceil(keys, sizeK));
    return own.map((c) => [c * sizeK, Math.min(keys, (c + 1) * sizeK)]);
  }
  function complement(spans, keys) {
    const ends = [0, ...spans.flat(), keys], result = [];
    for (let i = 0; i < ends.length; i += 2) if (ends[i] < ends[i + 1]) result.push([ends[i], ends[i + 1]]);
    return result;
  }
  const intersection = (left, right) => left.flatMap(([a, b]) => right.map(([c, d]) => [Math.max(a, c), Math.min(b, d)]).filter(([e, f]) => e < f));
  // Of a term, the keys that its documents, blocks and lists leave a row; neighbouring rows mostly share them.
  function dataReader(term, keys) {
    const data = term.filter(({ kind }) => READERS[kind]);
    let known = null, spans = [[0, keys]];
    return (q) => {
      const lines = data.map((literal) => lineOf(literal, q));
      if (known && lines.every((line, i) => line === known[i])) return spans;
      known = lines;
      spans = [[0, keys]];
      data.forEach((literal, i) => {
        const seen = lineSpans(literal, lines[i], keys);
        spans = intersection(spans, literal.negate ? complement(seen, keys) : seen);
      });
      return spans;
    };
  }
  function covered(spans) {
    spans.sort((x, y) => x[0] - y[0]);
    let total = 0, past = 0;
    for (const [a, b] of spans) { total += Math.max(0, b - Math.max(a, past)); past = Math.max(past, b); }
    return total;
  }

  function visiblePairs(program, b = 0) {
    const { shape } = program, { queries, keys } = shape;
    const found = program.terms.map((term) => [interval(term, shape, b), dataReader(term, keys)]);
    let total = 0;
    for (let q = 0; q < queries; q++) {
      const spans = [];
      for (const [{ lo, hi, start, end }, read] of found) {
        const first = Math.max(q + lo, start), past = Math.min(q + hi + 1, end);
        if (first >= past) continue;
        for (const [a, z] of read(q)) if (a < past && z > first) spans.push([Math.max(a, first), Math.min(z, past)]);
      }
      total += covered(spans);
    }
    return total;
  }

  return { lower, classify, visiblePairs, literals, perBatch, lengthsOf, sum, ceil };
})();
