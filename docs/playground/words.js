"use strict";
// What the playground says, in both languages.
const TileWords = (() => {
  const ERRORS = {
    character: ["this character means nothing here", "此处不认识这个字符"],
    mask: ["expected a mask ({names}) or '('", "此处应为掩码（{names}）或 '('"],
    operator: ["expected &, | or the end", "此处应为 &、| 或结尾"],
    sign: ["expected '{sign}'", "此处应为 '{sign}'"],
    separator: ["expected ',' or '{end}'", "此处应为 ',' 或 '{end}'"],
    argument: ["expected an integer, a list, bottom_right, top_left, or name=value", "此处应为整数、列表、bottom_right、top_left 或 名称=值"],
    value: ["expected a value: an integer, a list or a name", "此处应为值：整数、列表或名称"],
    integer: ["expected an integer", "此处应为整数"],
    "long-integer": ["an integer of at most 20 digits, please", "整数最多 20 位"],
    deep: ["nested too deeply; drop some parentheses or negations", "嵌套过深；请去掉一些括号或取反"],
    twice: ["{name} is given twice", "{name} 给了两次"],
    "too-many": ["too many arguments without a name: it takes {count}", "无名称的参数过多：最多 {count} 个"],
    "unknown-option": ["it has no argument {name}; it has: {names}", "没有参数 {name}；可用的有：{names}"],
    missing: ["it needs {name}", "缺少 {name}"],
    anchor: ["align is one of: {names}", "align 可取：{names}"],
    "needs-integer": ["{name} is an integer, as in 512", "{name} 应为整数，例如 512"],
    "needs-list": ["{name} is a list of integers, as in [700, 512]", "{name} 应为整数列表，例如 [700, 512]"],
    "needs-32-bits": ["{name}: integers of at most 32 bits", "{name}：整数最多 32 位"],
    "needs-table": ["{name} is a table: lists of equal length, as in [[1, 0], [1, 1]]", "{name} 应为表：等长的列表，例如 [[1, 0], [1, 1]]"],
    "needs-pair": ["{name} is an integer or a pair, as in (64, 128)", "{name} 应为整数或一对整数，例如 (64, 128)"],
    "at-least": ["{name} is at least {least}", "{name} 至少为 {least}"],
    "at-most": ["{name} is at most {most} (which means: no limit)", "{name} 至多为 {most}（表示无限制）"],
    "each-sequence": ["{name} has {count} integers; need 1, or one for each of the {batch} sequences", "{name} 有 {count} 个整数；应为 1 个，或 {batch} 个序列各一个"],
    "documents-sum": ["{name} add up to {sum}, but there are {length} positions", "{name} 之和为 {sum}，而位置共有 {length} 个"],
    "documents-queries": ["{queries} queries and {keys} keys differ: say documents(lengths, q_lengths=[…])", "{queries} 个查询与 {keys} 个键不等：请写 documents(lengths, q_lengths=[…])"],
    "blocks-shape": ["the table has {rows} × {cols} cells, but these lengths and blocks need {wantRows} × {wantCols}", "表有 {rows} × {cols} 格，而这样的长度与块需要 {wantRows} × {wantCols} 格"],
    "selected-shape": ["there are {rows} lists, but the queries in blocks of {per} need {wantRows}", "列表有 {rows} 个，而每 {per} 个查询一块，需要 {wantRows} 个"],
    terms: ["the mask expands to {count} alternatives, more than {most}; say it with fewer |", "掩码展开为 {count} 个并列项，超过 {most} 个；请减少 |"],
  };
  const PAGE = {
    "at": ["Position {at}: ", "第 {at} 个字符："],
    "at-end": ["At the end: ", "结尾处："],
    "got": ["got '{got}'; ", "得到 '{got}'；"],
    "range": ["{name}: need an integer from {least} to {most}", "{name}：应为 {least} 到 {most} 的整数"],
    "multiple": ["{heads} query heads are no multiple of {kvHeads} key heads", "{heads} 个查询头不是 {kvHeads} 个键头的整数倍"],
    "sizes": ["{tiles} tiles are too many to draw; take larger tiles or shorter sequences (at most {most})", "{tiles} 个分块太多，画不下；请加大分块或缩短序列（最多 {most} 个）"],
    "heads-many": ["batch × query heads: at most {most}", "批大小 × 查询头数：最多 {most}"],
    "visible": ["of all scores are visible", "的分数可见"],
    "computed": ["are computed: all scores of the tiles visited", "的分数要计算：凡访问的分块，整块计算"],
    "wasted": ["of the computed scores are masked away", "的计算结果被掩码丢弃"],
    "flops": ["FLOPs, of which {useful} are useful", "次浮点运算，其中 {useful} 有用"],
    "moved": ["moved between memory and chip (v2)", "在内存与芯片之间搬运（v2）"],
    "tensor": ["tensor", "张量"], "read": ["read", "读"], "written": ["written", "写"], "all": ["in all", "合计"],
    "standard": ["standard, six kernels", "标准做法，六个内核"], "v1": ["v1, K/V outside", "v1，外循环 K/V"],
    "v2": ["v2, Q outside: what the kernels run", "v2，外循环 Q：内核实际的做法"], "compulsory": ["what nobody can avoid", "谁也省不掉的"],
    "place": ["queries {q0}–{q1}, keys {k0}–{k1}: {kind}", "查询 {q0}–{q1}，键 {k0}–{k1}：{kind}"],
    "shared": ["Each pixel stands for several tiles: mixed ones are shown as PARTIAL.", "一个像素代表多个分块：混合的显示为 PARTIAL。"],
    "custom": ["my own tile", "自定分块"],
    "picture": ["Tiles of {mask}: {empty} EMPTY, {partial} PARTIAL, {full} FULL", "{mask} 的分块：EMPTY {empty}，PARTIAL {partial}，FULL {full}"],
  };
  function fill(pair, language, values = {}) {
    return pair[language === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (gap, name) => (name in values ? values[name] : gap));
  }
  const say = (key, language, values) => fill(PAGE[key], language, values);
  // A sentence for someone who mistyped: where, what was there, what is allowed.
  function error({ at, got, key, values }, language) {
    const where = got ? say("at", language, { at: at + 1 }) + say("got", language, { got }) : key === "terms" ? "" : say("at-end", language);
    return where + fill(ERRORS[key], language, values);
  }
  return { say, error };
})();
