"use strict";
// Bytes between memory and chip of a forward pass, by tensor, as `tilewise.model` counts them: the textbook way in six kernels,
// K/V blocks outside (v1), Q blocks outside (v2, what the kernels run), and what nobody can avoid.
const TileModel = (() => {
  const { lengthsOf, literals, perBatch, sum, ceil } = MaskTiles;
  const ITEMSIZE = { float16: 2, bfloat16: 2, float32: 4, float64: 8 };

  class Traffic {
    constructor({ headDim, dtype, keys }) {
      const size = ITEMSIZE[dtype], stat = dtype === "float64" ? 8 : 4;
      this.reads = {};
      this.writes = {};
      this.rowBytes = { Q: headDim * size, K: headDim * size, V: headDim * size, O: headDim * size, acc: headDim * stat,
        m: stat, l: stat, LSE: stat, rowmax: stat, rowsum: stat, S: keys * size, E: keys * size, P: keys * size };
    }
    add(table, name, bytes) { if (bytes) table[name] = (table[name] || 0) + bytes; }
    read(rows, ...names) { for (const name of names) this.add(this.reads, name, rows * this.rowBytes[name]); }
    write(rows, ...names) { for (const name of names) this.add(this.writes, name, rows * this.rowBytes[name]); }
    toJSON() { return { reads: this.reads, writes: this.writes }; }
    get total() { return sum(Object.values(this.reads)) + sum(Object.values(this.writes)); }
  }

  // Bytes that evaluating the mask over a tile reads from its tensors.
  function maskBytes(program, rowLengths, colLengths, blockQ, blockK) {
    const spans = (lengths, block, size) => lengths.map((own, i) => Math.floor((i * block + own - 1) / size) - Math.floor((i * block) / size) + 1);
    const parts = literals(program).map((literal) => {
      const { kind, sizeQ, sizeK, tensors } = literal;
      if (kind === "d") return (i, j) => 4 * (rowLengths[i] + colLengths[j]);
      const rows = "si".includes(kind) ? spans(rowLengths, blockQ, sizeQ) : [];
      if (kind === "i") return (i) => 4 * literal.lists[0].length * rows[i];
      const cols = kind === "s" ? spans(colLengths, blockK, sizeK) : [];
      return kind === "s" ? (i, j) => rows[i] * cols[j] : () => 4 * tensors;
    });
    return (i, j) => parts.reduce((total, part) => total + part(i, j), 0);
  }

  // What the schedules count of one sequence's tiles.
  function countTiles(program, tiles, blockQ, blockK) {
    const { queries, keys } = program.shape, { rows, cols, classes } = tiles;
    const rowLengths = lengthsOf(queries, blockQ), colLengths = lengthsOf(keys, blockK);
    const reads = literals(program).some(({ tensors }) => tensors), bytes = maskBytes(program, rowLengths, colLengths, blockQ, blockK);
    const used = new Uint8Array(cols), counts = [0, 0, 0];
    const found = { rows: 0, rowsByTile: 0, keysByTile: 0, keysUsed: 0, area: 0, mask: 0, counts };
    for (let i = 0; i < rows; i++) {
      let visited = 0, seen = 0;
      for (let j = 0; j < cols; j++) {
        const kind = classes[i * cols + j];
        counts[kind]++;
        if (!kind) continue;
        used[j] = 1;
        visited++;
        seen += colLengths[j];
        if (reads && kind === 1) found.mask += bytes(i, j);
      }
      found.rows += visited ? rowLengths[i] : 0;
      found.rowsByTile += visited * rowLengths[i];
      found.keysByTile += seen;
      found.area += seen * rowLengths[i];
    }
    found.keysUsed = sum(colLengths.filter((_, j) => used[j]));
    return found;
  }

  function schedules(problem, program, sequences, repeat) {
    const { batch, heads, kvHeads, queries, keys } = problem;
    const [standard, v1, v2, compulsory] = Array.from({ length: 4 }, () => new Traffic(problem));
    for (const found of sequences) {
      const count = repeat * heads, every = queries * count, rows = found.rowsByTile * count;
      v2.read(found.rows * count, "Q");
      v2.read(found.keysByTile * count, "K", "V");
      v2.write(every, "O", "LSE");
      v1.read(found.keysUsed * count, "K", "V");
      v1.read(rows, "Q", "m");
      v1.write(every + rows, "acc", "m", "l");
      v1.read(rows + every, "acc", "l");
      v1.write(every, "O");
      for (const moved of [v1, v2]) moved.add(moved.reads, "mask", found.mask * count);
      compulsory.read(found.keysUsed * repeat * kvHeads, "K", "V");
      compulsory.read(found.rows * count, "Q");
    }
    const rows = batch * heads * queries;
    compulsory.write(rows, "O", "LSE");
    standard.read(rows, "Q");
    standard.read(batch * heads * keys, "K", "V");
    standard.add(standard.reads, "mask", batch * heads * maskBytes(program, [queries], [keys], queries, keys)(0, 0));
    standard.write(rows, "S", "rowmax", "E", "rowsum", "P", "O");
    standard.read(2 * rows, "S", "E"); // for the maxima and the exponentials; for the sums and the division
    standard.read(rows, "rowmax", "rowsum", "P");
    return { standard, v1, v2, compulsory };
  }

  // Everything the page shows of a problem {batch, heads, kvHeads, queries, keys, headDim, dtype, blockQ, blockK} and a mask's text.
  function evaluate(text, problem) {
    const { batch, heads, queries, keys, headDim, blockQ, blockK } = problem;
    const mask = MaskText.parse(text), program = MaskTiles.lower(mask, { batch, queries, keys });
    const own = perBatch(program) ? batch : 1, repeat = batch / own;
    const tiles = Array.from({ length: own }, (_, b) => MaskTiles.classify(program, blockQ, blockK, b));
    const sequences = tiles.map((one) => countTiles(program, one, blockQ, blockK));
    const over = (value) => sum(sequences.map(value)) * repeat * heads;
    const pairs = sum(tiles.map((_, b) => MaskTiles.visiblePairs(program, b))) * repeat * heads;
    const counts = [0, 1, 2].map((kind) => over((one) => one.counts[kind]));
    const area = over((one) => one.area), each = 4 * headDim;
    const flops = { useful: pairs * each, visited: area * each, executed: (counts[1] + counts[2]) * blockQ * blockK * each };
    return { python: MaskText.python(mask), tiles, counts, pairs, area, every: batch * heads * queries * keys, flops,
      traffic: schedules(problem, program, sequences, repeat) };
  }

  return { evaluate, ceil, DTYPES: Object.keys(ITEMSIZE) };
})();
