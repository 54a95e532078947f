//! Views of numbers in memory as matrices, and the products of the CPU body: f32 sums whatever the elements' type.
//!
//! The kernel multiplies rows of the left matrix with panels of the right one. A panel is 32 columns of the right matrix laid out
//! one row after another, so that the inner loop reads it in order; panels are packed once per product. Each element of a result
//! is one chain of fused multiply-adds in the order of the inner dimension: it does not depend on the number of threads, nor on
//! which other rows are computed beside it.

use burn_flex::FlexTensor;
use half::bf16;
use pulp::Simd;
use rayon::prelude::*;

use super::buffer::Buffer;

/// Columns of a panel.
pub(super) const PANEL: usize = 32;

/// Rows that one thread computes at a time.
const ROWS: usize = 96;

/// A number that a matrix may hold.
pub(super) trait Element: Copy + Send + Sync {
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// A matrix in memory: element `(i, j)` is `data[i * row_stride + j * col_stride]`. One of the strides is 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix<'a, T = f32> {
    data: &'a [T],
    pub(super) n_rows: usize,
    pub(super) n_cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Element> Matrix<'a, T> {
    /// Over rows that follow each other, `row_stride` apart.
    pub(super) fn new(data: &'a [T], n_rows: usize, n_cols: usize, row_stride: usize) -> Self {
        Self { data, n_rows, n_cols, row_stride, col_stride: 1 }
    }

    /// Rows and columns exchanged.
    pub(super) fn transposed(self) -> Self {
        Self {
            n_rows: self.n_cols,
            n_cols: self.n_rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// The rows from `start` on, `n` of them.
    pub(super) fn rows(self, start: usize, n: usize) -> Self {
        assert!(start + n <= self.n_rows);
        Self { data: &self.data[(start * self.row_stride).min(self.data.len())..], n_rows: n, ..self }
    }

    /// The numbers column after column, if columns follow each other without a gap.
    pub(super) fn column_major(&self) -> Option<&'a [T]> {
        (self.row_stride == 1 && self.col_stride == self.n_rows).then_some(self.data)
    }

    /// Element `(i, j)`.
    #[inline(always)]
    pub(super) fn at(&self, i: usize, j: usize) -> T {
        self.data[i * self.row_stride + j * self.col_stride]
    }

    /// Row `i` where rows are contiguous.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.row_stride..][..self.n_cols]
    }

    /// Writes columns `first..first + PANEL` row after row into `out`, with zeros for columns that are not there.
    fn pack_panel(&self, first: usize, out: &mut [f32]) {
        let width = PANEL.min(self.n_cols - first);
        if self.col_stride == 1 {
            for (i, out) in out.chunks_exact_mut(PANEL).enumerate() {
                let row = &self.data[i * self.row_stride + first..][..width];
                out[..width].iter_mut().zip(row).for_each(|(o, x)| *o = x.to_f32());
                out[width..].fill(0.0);
            }
            return;
        }
        let columns: [&[T]; PANEL] = std::array::from_fn(|j| match j < width {
            true => &self.data[(first + j) * self.col_stride..][..self.n_rows],
            false => &[],
        });
        // Full tiles of 16 x 16 turn in registers; what is left goes one by one.
        const TILE: usize = 16;
        let n_tiled = if width == PANEL { self.n_rows / TILE * TILE } else { 0 };
        for i in (0..n_tiled).step_by(TILE) {
            for half in [0, TILE] {
                let tile: [[T; TILE]; TILE] =
                    std::array::from_fn(|j| columns[half + j][i..i + TILE].try_into().expect("a row of a tile"));
                for (di, out) in out[i * PANEL..(i + TILE) * PANEL].chunks_exact_mut(PANEL).enumerate() {
                    for (out, column) in out[half..half + TILE].iter_mut().zip(&tile) {
                        *out = column[di].to_f32();
                    }
                }
            }
        }
        for (i, out) in out.chunks_exact_mut(PANEL).enumerate().skip(n_tiled) {
            out[..width].iter_mut().zip(&columns).for_each(|(o, column)| *o = column[i].to_f32());
            out[width..].fill(0.0);
        }
    }

    /// Packs the whole matrix as the right side of a product.
    pub(super) fn panels(self) -> Panels {
        let n_panels = self.n_cols.div_ceil(PANEL);
        let mut values = Buffer::take(n_panels * self.n_rows * PANEL);
        let pack = |(p, out): (usize, &mut [f32])| self.pack_panel(p * PANEL, out);
        let size = (self.n_rows * PANEL).max(1);
        match values.len() < PARALLEL_FROM {
            true => values.chunks_mut(size).enumerate().for_each(pack),
            false => values.par_chunks_mut(size).enumerate().for_each(pack),
        }
        Panels { values, n_rows: self.n_rows, n_cols: self.n_cols }
    }
}

/// Below this many numbers or multiplications a second thread costs more than it saves.
const PARALLEL_FROM: usize = 1 << 15;

/// The right side of a product, packed: `[panels, rows, PANEL]`.
#[derive(Debug)]
pub(super) struct Panels {
    values: Buffer,
    n_rows: usize,
    n_cols: usize,
}

impl Panels {
    pub(super) fn view(&self) -> PanelView<'_> {
        PanelView { values: &self.values, n_rows: self.n_rows, n_cols: self.n_cols }
    }
}

/// Numbers that are laid out as the right side of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct PanelView<'a> {
    values: &'a [f32],
    n_rows: usize,
    n_cols: usize,
}

impl<'a> PanelView<'a> {
    /// Over `[panels, n_rows, PANEL]` numbers.
    pub(super) fn new(values: &'a [f32], n_rows: usize, n_cols: usize) -> Self {
        assert_eq!(values.len(), n_rows * n_cols.next_multiple_of(PANEL), "whole panels");
        Self { values, n_rows, n_cols }
    }

    /// One panel, its empty columns (which are zero) included.
    pub(super) fn whole_panel(self, p: usize) -> Self {
        Self { values: self.panel(p), n_cols: PANEL, ..self }
    }

    pub(super) fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// The first `n` columns.
    pub(super) fn first_columns(self, n: usize) -> Self {
        assert!(n <= self.n_cols);
        Self { values: &self.values[..n.div_ceil(PANEL) * PANEL * self.n_rows], n_cols: n, ..self }
    }

    #[inline(always)]
    fn panel(&self, p: usize) -> &'a [f32] {
        &self.values[p * self.n_rows * PANEL..][..self.n_rows * PANEL]
    }

    fn n_panels(&self) -> usize {
        self.n_cols.div_ceil(PANEL)
    }
}

/// A weight matrix `[d_in, d_out]` in the type it is stored in.
#[derive(Clone, Copy, Debug)]
pub(super) enum Weight<'a> {
    F32(Matrix<'a, f32>),
    Bf16(Matrix<'a, bf16>),
}

impl Weight<'_> {
    pub(super) fn transposed(self) -> Self {
        match self {
            Self::F32(m) => Self::F32(m.transposed()),
            Self::Bf16(m) => Self::Bf16(m.transposed()),
        }
    }

    pub(super) fn panels(self) -> Panels {
        match self {
            Self::F32(m) => m.panels(),
            Self::Bf16(m) => m.panels(),
        }
    }
}

/// A tensor `[rows, cols]` as a matrix; one that is strided in both dimensions must have been made contiguous.
pub(super) fn weight_of(tensor: &FlexTensor) -> Weight<'_> {
    fn view<'a, T: Element>(tensor: &FlexTensor, data: &'a [T]) -> Matrix<'a, T> {
        let (shape, strides) = (tensor.layout().shape(), tensor.layout().strides());
        let stride = |i: usize| usize::try_from(strides[i]).expect("no flipped weights");
        let data = &data[tensor.layout().start_offset()..];
        let (n_rows, n_cols) = (shape[0], shape[1]);
        match (stride(0), stride(1)) {
            (rows, 1) => Matrix::new(data, n_rows, n_cols, rows),
            (1, cols) => Matrix::new(data, n_cols, n_rows, cols).transposed(),
            strides => panic!("a matrix with strides {strides:?}"),
        }
    }
    match tensor.dtype() {
        burn::tensor::DType::F32 => Weight::F32(view(tensor, tensor.storage::<f32>())),
        burn::tensor::DType::BF16 => Weight::Bf16(view(tensor, tensor.storage::<bf16>())),
        other => panic!("the fused operators take weights in f32 and bf16, not {other:?}"),
    }
}

/// What a product is added to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Onto<'a> {
    /// Nothing.
    Zero,
    /// What the result's place holds.
    Itself,
    /// These rows, laid out as the result.
    Rows(&'a [f32]),
}

/// One summand of a product.
pub(super) type Term<'a> = (Matrix<'a>, PanelView<'a>);

/// `out = onto + sum of left * right over the terms`; `out` is contiguous, `[rows, cols]`. The sum is taken first and then added.
pub(super) fn multiply(terms: &[Term<'_>], onto: Onto<'_>, out: &mut [f32]) {
    let (n_rows, n_cols) = (terms[0].0.n_rows, terms[0].1.n_cols);
    assert!(terms.iter().all(|(a, b)| a.n_rows == n_rows && b.n_cols == n_cols && a.n_cols == b.n_rows), "shapes of a product");
    assert_eq!(out.len(), n_rows * n_cols, "a result's length");
    let inner: usize = terms.iter().map(|(a, _)| a.n_cols).sum();
    if n_rows * n_cols * inner < PARALLEL_FROM * 8 {
        return block(terms, 0, n_rows, 0..terms[0].1.n_panels(), onto, out, n_cols);
    }
    let threads = rayon::current_num_threads();
    if n_rows >= ROWS / 2 * threads {
        // As many rows as give every thread the same work, at most ROWS.
        let n_blocks = n_rows.div_ceil(ROWS).next_multiple_of(threads);
        let rows = n_rows.div_ceil(n_blocks).next_multiple_of(MOST_ROWS);
        out.par_chunks_mut(rows * n_cols).enumerate().for_each(|(i, out)| {
            let onto = match onto {
                Onto::Rows(rows_of) => Onto::Rows(&rows_of[i * rows * n_cols..][..out.len()]),
                other => other,
            };
            block(terms, i * rows, out.len() / n_cols, 0..terms[0].1.n_panels(), onto, out, n_cols);
        });
        return;
    }
    // Few rows: threads share the columns, each panel in a place of its own.
    let mut columns = Buffer::take(terms[0].1.n_panels() * n_rows * PANEL);
    columns.par_chunks_mut(n_rows * PANEL).enumerate().for_each(|(p, out)| {
        block(terms, 0, n_rows, p..p + 1, Onto::Zero, out, PANEL);
    });
    for (i, out) in out.chunks_exact_mut(n_cols).enumerate() {
        for (p, out) in out.chunks_mut(PANEL).enumerate() {
            let sums = &columns[(p * n_rows + i) * PANEL..][..out.len()];
            match onto {
                Onto::Zero => out.copy_from_slice(sums),
                Onto::Itself => out.iter_mut().zip(sums).for_each(|(o, s)| *o += s),
                Onto::Rows(rows) => {
                    let onto = &rows[i * n_cols + p * PANEL..];
                    out.iter_mut().zip(sums).zip(onto).for_each(|((o, s), r)| *o = r + s);
                }
            }
        }
    }
}

/// The same on one thread with a result whose rows are `stride` apart.
pub(super) fn multiply_here(a: Matrix<'_>, b: PanelView<'_>, onto: Onto<'_>, out: &mut [f32], stride: usize) {
    block(&[(a, b)], 0, a.n_rows, 0..b.n_panels(), onto, out, stride);
}

/// The same for several summands.
pub(super) fn multiply_terms_here(terms: &[Term<'_>], onto: Onto<'_>, out: &mut [f32], stride: usize) {
    block(terms, 0, terms[0].0.n_rows, 0..terms[0].1.n_panels(), onto, out, stride);
}

/// Most rows of a tile.
const MOST_ROWS: usize = 12;

/// Rows `first..first + n_rows` of a product times some panels, on this thread. `out` begins at the first row and panel.
fn block(
    terms: &[Term<'_>],
    first: usize,
    n_rows: usize,
    panels: std::ops::Range<usize>,
    onto: Onto<'_>,
    out: &mut [f32],
    stride: usize,
) {
    for p in panels.clone() {
        let first_col = p * PANEL;
        let width = PANEL.min(terms[0].1.n_cols - first_col);
        let in_out = (p - panels.start) * PANEL;
        let onto = match onto {
            Onto::Rows(rows) => Onto::Rows(&rows[in_out..]),
            other => other,
        };
        one_panel(terms, first, n_rows, p, (onto, width, stride), &mut out[in_out..]);
    }
}

#[pulp::with_simd(one_panel = pulp::Arch::new())]
#[inline(always)]
fn one_panel_simd<S: Simd>(
    simd: S,
    terms: &[Term<'_>],
    first: usize,
    n_rows: usize,
    p: usize,
    place: (Onto<'_>, usize, usize),
    out: &mut [f32],
) {
    let mut done = 0;
    // Tiles of as many rows as the registers hold, then of fewer.
    macro_rules! tiles {
        ($rows:literal, $vectors:literal) => {
            while n_rows - done >= $rows {
                tile::<S, $rows, $vectors>(simd, terms, first + done, p, place, done, out);
                done += $rows;
            }
        };
    }
    let narrow = place.1 <= S::F32_LANES;
    match (S::F32_LANES, narrow) {
        (16, false) => {
            tiles!(12, 2);
            tiles!(8, 2);
            tiles!(4, 2);
            tiles!(1, 2);
        }
        (16, true) => {
            tiles!(12, 1);
            tiles!(4, 1);
            tiles!(1, 1);
        }
        (8, _) => {
            tiles!(6, 2);
            tiles!(2, 2);
            tiles!(1, 2);
        }
        _ => {
            tiles!(4, 1);
            tiles!(1, 1);
        }
    }
}

/// A tile of `ROWS` rows and one panel, `VECTORS` vectors of columns at a time.
#[inline(always)]
fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    terms: &[Term<'_>],
    first: usize,
    p: usize,
    (onto, width, stride): (Onto<'_>, usize, usize),
    at: usize,
    out: &mut [f32],
) {
    let lanes = VECTORS * S::F32_LANES;
    for start in (0..width).step_by(lanes) {
        let vector = start / S::F32_LANES;
        let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
        for (a, b) in terms {
            let (panel, _) = S::as_simd_f32s(b.panel(p));
            let panel = panel.chunks_exact(PANEL / S::F32_LANES);
            if a.col_stride == 1 {
                let rows: [&[f32]; ROWS] = std::array::from_fn(|i| a.row(first + i));
                for (k, b) in (0..a.n_cols).zip(panel) {
                    let b = &b[vector..vector + VECTORS];
                    for i in 0..ROWS {
                        let x = simd.splat_f32s(rows[i][k]);
                        for j in 0..VECTORS {
                            sums[i][j] = simd.mul_add_f32s(x, b[j], sums[i][j]);
                        }
                    }
                }
            } else {
                for (a, b) in a.data[first..].chunks(a.col_stride).zip(panel) {
                    let (a, b) = (&a[..ROWS], &b[vector..vector + VECTORS]);
                    for i in 0..ROWS {
                        let x = simd.splat_f32s(a[i]);
                        for j in 0..VECTORS {
                            sums[i][j] = simd.mul_add_f32s(x, b[j], sums[i][j]);
                        }
                    }
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            let from = (at + i) * stride + start;
            let n = lanes.min(width - start);
            let out = &mut out[from..from + n];
            let mut whole = [0.0; PANEL];
            let target = if n == lanes { &mut *out } else { &mut whole[..lanes] };
            let (target, _) = S::as_mut_simd_f32s(target);
            if n == lanes {
                match onto {
                    Onto::Zero => target.copy_from_slice(sums),
                    Onto::Itself => target.iter_mut().zip(sums).for_each(|(t, s)| *t = simd.add_f32s(*t, *s)),
                    Onto::Rows(rows) => {
                        let (rows, _) = S::as_simd_f32s(&rows[from..from + n]);
                        target.iter_mut().zip(sums).zip(rows).for_each(|((t, s), r)| *t = simd.add_f32s(*r, *s));
                    }
                }
                continue;
            }
            target.copy_from_slice(sums);
            match onto {
                Onto::Zero => out.copy_from_slice(&whole[..n]),
                Onto::Itself => out.iter_mut().zip(&whole).for_each(|(o, s)| *o += s),
                Onto::Rows(rows) => out.iter_mut().zip(&whole).zip(&rows[from..]).for_each(|((o, s), r)| *o = r + s),
            }
        }
    }
}
