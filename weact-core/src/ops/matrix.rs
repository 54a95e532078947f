//! Views of numbers in memory as matrices, and the products of the CPU body: f32 sums whatever the elements' type.
//!
//! The kernel multiplies rows of the left matrix with panels of the right one. A panel is 32 columns of the right matrix laid out
//! one row after another, so that the inner loop reads it in order; panels are packed once per product. Each element of a result
//! is one chain of fused multiply-adds in the order of the inner dimension: it does not depend on the number of threads, nor on
//! which other rows are computed beside it.

use std::ops::Range;

use burn_flex::FlexTensor;
use half::bf16;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::buffer::Buffer;

/// Columns of a panel.
pub(super) const PANEL: usize = 32;

/// A number that a matrix may hold.
pub(super) trait Element: Copy + Send + Sync {
    fn widened(self) -> f32;

    /// As many numbers as a vector holds.
    fn vector<S: Simd>(from: &[Self]) -> S::f32s;
}

impl Element for f32 {
    #[inline(always)]
    fn widened(self) -> f32 {
        self
    }

    #[inline(always)]
    fn vector<S: Simd>(from: &[Self]) -> S::f32s {
        S::as_simd_f32s(from).0[0]
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widened(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn vector<S: Simd>(from: &[Self]) -> S::f32s {
        /// Of a fixed length, so that it becomes vector code.
        #[inline(always)]
        fn widen<const N: usize>(from: &[bf16]) -> [f32; N] {
            let from: &[bf16; N] = from.try_into().expect("as many numbers as a vector holds");
            let mut wide = [0.0; N];
            for i in 0..N {
                wide[i] = from[i].widened();
            }
            wide
        }
        match S::F32_LANES {
            16 => S::as_simd_f32s(&widen::<16>(from)).0[0],
            8 => S::as_simd_f32s(&widen::<8>(from)).0[0],
            4 => S::as_simd_f32s(&widen::<4>(from)).0[0],
            _ => S::as_simd_f32s(&widen::<1>(from)).0[0],
        }
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
        Self { n_rows: self.n_cols, n_cols: self.n_rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
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

    /// Whether columns lie in one piece, and rows do not.
    pub(super) fn is_turned(&self) -> bool {
        self.col_stride != 1
    }

    /// Row `i` where rows are contiguous.
    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> &'a [T] {
        &self.data[i * self.row_stride..][..self.n_cols]
    }

    /// Writes the columns from `first` on, `n` of them, panel after panel into `out`, with zeros for columns that are not there.
    fn pack(&self, first: usize, n: usize, out: &mut [f32]) {
        struct Pack<'a, 'b, T>(&'a Matrix<'a, T>, usize, usize, &'b mut [f32]);
        impl<T: Element> WithSimd for Pack<'_, '_, T> {
            type Output = ();
            #[inline(always)]
            fn with_simd<S: Simd>(self, simd: S) {
                self.0.pack_with(simd, self.1, self.2, self.3);
            }
        }
        pulp::Arch::new().dispatch(Pack(self, first, n, out));
    }

    #[inline(always)]
    fn pack_with<S: Simd>(&self, _: S, first: usize, n: usize, out: &mut [f32]) {
        let size = self.n_rows * PANEL;
        if self.col_stride != 1 {
            for (p, out) in out.chunks_exact_mut(size).take(n.div_ceil(PANEL)).enumerate() {
                self.turn_panel(first + p * PANEL, PANEL.min(n - p * PANEL), out);
            }
            return;
        }
        for (p, out) in out.chunks_exact_mut(size).take(n.div_ceil(PANEL)).enumerate() {
            let (first, width) = (first + p * PANEL, PANEL.min(n - p * PANEL));
            let (out, _) = out.as_chunks_mut::<PANEL>();
            for (i, out) in out.iter_mut().enumerate() {
                let row = &self.data[i * self.row_stride + first..][..width];
                match <&[T; PANEL]>::try_from(row) {
                    Ok(row) => (0..PANEL).for_each(|j| out[j] = row[j].widened()),
                    Err(_) => {
                        out.fill(0.0);
                        out.iter_mut().zip(row).for_each(|(o, x)| *o = x.widened());
                    }
                }
            }
        }
    }

    /// Writes `width` columns, each of which lies in one piece, row after row into `out`.
    #[inline(always)]
    fn turn_panel(&self, first: usize, width: usize, out: &mut [f32]) {
        let mut columns: [&[T]; PANEL] = [&[]; PANEL];
        for (j, column) in columns[..width].iter_mut().enumerate() {
            *column = &self.data[(first + j) * self.col_stride..][..self.n_rows];
        }
        // Full tiles of 16 x 16 turn in registers; what is left goes one by one.
        const TILE: usize = 16;
        let n_tiled = if width == PANEL { self.n_rows / TILE * TILE } else { 0 };
        for i in (0..n_tiled).step_by(TILE) {
            for half in [0, TILE] {
                let mut tile = [[0.0; TILE]; TILE];
                for j in 0..TILE {
                    let column = &columns[half + j][i..i + TILE];
                    for k in 0..TILE {
                        tile[j][k] = column[k].widened();
                    }
                }
                for (di, out) in out[i * PANEL..(i + TILE) * PANEL].chunks_exact_mut(PANEL).enumerate() {
                    let out = &mut out[half..half + TILE];
                    for j in 0..TILE {
                        out[j] = tile[j][di];
                    }
                }
            }
        }
        for (i, out) in out.chunks_exact_mut(PANEL).take(self.n_rows).enumerate().skip(n_tiled) {
            out[..width].iter_mut().zip(&columns).for_each(|(o, column)| *o = column[i].widened());
            out[width..].fill(0.0);
        }
    }

    /// Packs the whole matrix as the right side of a product, on this thread.
    pub(super) fn panels(self) -> Panels {
        let n_panels = self.n_cols.div_ceil(PANEL);
        let mut values = Buffer::take(n_panels * self.n_rows * PANEL);
        self.pack(0, self.n_cols, &mut values);
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

/// The left side of a product.
#[derive(Clone, Copy, Debug)]
pub(super) enum Left<'a> {
    /// As it lies in memory.
    Lies(Matrix<'a>),
    /// Copied, `MOST_ROWS` rows at a time: `[strips, n_cols, MOST_ROWS]`.
    Strips { values: &'a [f32], n_rows: usize, n_cols: usize },
}

impl<'a> From<Matrix<'a>> for Left<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        Self::Lies(matrix)
    }
}

impl Left<'_> {
    fn n_rows(&self) -> usize {
        match self {
            Self::Lies(matrix) => matrix.n_rows,
            Self::Strips { n_rows, .. } => *n_rows,
        }
    }

    fn n_cols(&self) -> usize {
        match self {
            Self::Lies(matrix) => matrix.n_cols,
            Self::Strips { n_cols, .. } => *n_cols,
        }
    }
}

/// A left side whose columns lay in one piece, copied so that the rows of a tile lie together.
#[derive(Debug)]
pub(super) struct Strips {
    values: Buffer,
    n_rows: usize,
    n_cols: usize,
}

impl Strips {
    pub(super) fn view(&self) -> Left<'_> {
        Left::Strips { values: &self.values, n_rows: self.n_rows, n_cols: self.n_cols }
    }
}

impl Matrix<'_> {
    /// Copies a matrix whose columns lie in one piece.
    pub(super) fn strips(self, parallel: bool) -> Strips {
        assert_eq!(self.row_stride, 1, "columns in one piece");
        let Self { n_rows, n_cols, .. } = self;
        let mut values = Buffer::take(n_rows.div_ceil(MOST_ROWS) * n_cols * MOST_ROWS);
        // A few strips at a time, so that each visit of a column takes more than a cache line.
        const TOGETHER: usize = 8;
        let copy = |(i, out): (usize, &mut [f32])| {
            let first = i * TOGETHER * MOST_ROWS;
            let n = (TOGETHER * MOST_ROWS).min(n_rows - first);
            for k in 0..n_cols {
                let (whole, rest) = self.data[k * self.col_stride + first..][..n].as_chunks::<MOST_ROWS>();
                for (s, part) in whole.iter().enumerate() {
                    out[(s * n_cols + k) * MOST_ROWS..][..MOST_ROWS].copy_from_slice(part);
                }
                if !rest.is_empty() {
                    let out = &mut out[(whole.len() * n_cols + k) * MOST_ROWS..][..MOST_ROWS];
                    out[..rest.len()].copy_from_slice(rest);
                    out[rest.len()..].fill(0.0);
                }
            }
        };
        let chunk = TOGETHER * MOST_ROWS * n_cols;
        match parallel {
            true => values.par_chunks_mut(chunk).enumerate().for_each(copy),
            false => values.chunks_mut(chunk).enumerate().for_each(copy),
        }
        Strips { values, n_rows, n_cols }
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

    fn dims(&self) -> (usize, usize) {
        match self {
            Self::F32(m) => (m.n_rows, m.n_cols),
            Self::Bf16(m) => (m.n_rows, m.n_cols),
        }
    }

    fn pack(&self, first: usize, n: usize, out: &mut [f32]) {
        match self {
            Self::F32(m) => m.pack(first, n, out),
            Self::Bf16(m) => m.pack(first, n, out),
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

/// One summand of a product whose right side is packed.
pub(super) type Term<'a> = (Left<'a>, PanelView<'a>);

/// One summand of a product.
pub(super) type Summand<'a> = (Matrix<'a>, Weight<'a>);

/// Numbers of the right side that are packed at a time: they stay in the cache while all rows pass by.
const PACKED: usize = 1 << 18;

/// `out = onto + sum of left * right over the summands`; `out` is contiguous, `[rows, cols]`. The sum is taken first and then
/// added. Threads share the columns, so that each packs what it reads; where there are more threads than panels, the rows too.
pub(super) fn multiply(summands: &[Summand<'_>], onto: Onto<'_>, out: &mut [f32]) {
    let (n_rows, n_cols) = (summands[0].0.n_rows, summands[0].1.dims().1);
    for (left, right) in summands {
        assert_eq!((left.n_rows, (left.n_cols, n_cols)), (n_rows, right.dims()), "shapes of a product");
    }
    assert_eq!(out.len(), n_rows * n_cols, "a result's length");
    let inner: usize = summands.iter().map(|(left, _)| left.n_cols).sum();
    let n_panels = n_cols.div_ceil(PANEL);
    let threads = if n_rows * n_cols * inner < PARALLEL_FROM * 8 { 1 } else { rayon::current_num_threads() };
    let groups = threads.min(n_panels);
    let (panels, groups) = shares(n_panels, groups);
    let (rows, _) = shares(n_rows.div_ceil(MOST_ROWS), threads.div_ceil(groups));
    let rows = rows * MOST_ROWS;
    let mut tasks: Vec<Task<'_>> = Vec::new();
    for (i, out) in out.chunks_mut(rows * n_cols).enumerate() {
        let of_block = tasks.len();
        tasks.extend((0..groups).map(|g| Task { first_row: i * rows, first_panel: g * panels, out: Vec::new() }));
        for row in out.chunks_exact_mut(n_cols) {
            let parts = row.chunks_mut(panels * PANEL);
            tasks[of_block..].iter_mut().zip(parts).for_each(|(task, part)| task.out.push(part));
        }
    }
    // Columns of a left side that is turned lie far apart: copied once, rows of a tile lie together.
    let strips: Vec<Option<Strips>> =
        summands.iter().map(|(left, _)| (left.is_turned() && n_panels > 1).then(|| left.strips(threads > 1))).collect();
    let lefts: Vec<Left<'_>> =
        summands.iter().zip(&strips).map(|((m, _), s)| s.as_ref().map_or(Left::Lies(*m), Strips::view)).collect();
    let compute = |task: Task<'_>| task.compute(&lefts, summands, onto, n_cols);
    match threads {
        1 => tasks.into_iter().for_each(compute),
        _ => tasks.into_par_iter().for_each(compute),
    }
}

/// Cuts `n` into at most `parts` equal shares: the size of a share, and how many there are.
fn shares(n: usize, parts: usize) -> (usize, usize) {
    let size = n.div_ceil(parts);
    (size, n.div_ceil(size))
}

/// A block of a product's result.
struct Task<'a> {
    first_row: usize,
    first_panel: usize,
    out: Vec<&'a mut [f32]>, // the part of each row
}

impl Task<'_> {
    fn compute(mut self, lefts: &[Left<'_>], summands: &[Summand<'_>], onto: Onto<'_>, n_cols: usize) {
        let (n_rows, width) = (self.out.len(), self.out[0].len());
        let sizes: Vec<usize> = summands.iter().map(|(left, _)| left.n_cols * PANEL).collect();
        let panels = (PACKED / sizes[0].max(1)).clamp(1, width.div_ceil(PANEL));
        let mut packed: Vec<Buffer> = sizes.iter().map(|size| Buffer::take(size * panels)).collect();
        for start in (0..width).step_by(panels * PANEL) {
            let n = (panels * PANEL).min(width - start);
            let first_col = self.first_panel * PANEL + start;
            for (packed, (_, right)) in packed.iter_mut().zip(summands) {
                right.pack(first_col, n, packed);
            }
            let mut terms: Vec<Term<'_>> = Vec::with_capacity(lefts.len());
            for (left, packed) in lefts.iter().zip(&packed) {
                let values = &packed[..n.div_ceil(PANEL) * PANEL * left.n_cols()];
                terms.push((*left, PanelView { values, n_rows: left.n_cols(), n_cols: n }));
            }
            let place = Place { first_row: self.first_row, n_rows, first_col: start };
            let onto = match onto {
                Onto::Rows(rows) => Onto::Rows(&rows[self.first_row * n_cols + first_col - start..]),
                other => other,
            };
            block(&terms, (onto, n_cols), place, &mut Parts(&mut self.out));
        }
    }
}

/// `out = onto + left right` on one thread, with a result whose rows are `stride` apart.
pub(super) fn multiply_here(terms: &[Term<'_>], onto: Onto<'_>, out: &mut [f32], stride: usize) {
    let place = Place { first_row: 0, n_rows: terms[0].0.n_rows(), first_col: 0 };
    block(terms, (onto, stride), place, &mut Strided(out, stride));
}

/// Where a result's rows are.
trait Output {
    fn row(&mut self, i: usize, columns: Range<usize>) -> &mut [f32];
}

/// Rows that are a number apart.
struct Strided<'a>(&'a mut [f32], usize);

impl Output for Strided<'_> {
    #[inline(always)]
    fn row(&mut self, i: usize, columns: Range<usize>) -> &mut [f32] {
        &mut self.0[i * self.1 + columns.start..i * self.1 + columns.end]
    }
}

/// Parts of rows.
struct Parts<'a, 'b>(&'a mut [&'b mut [f32]]);

impl Output for Parts<'_, '_> {
    #[inline(always)]
    fn row(&mut self, i: usize, columns: Range<usize>) -> &mut [f32] {
        &mut self.0[i][columns]
    }
}

/// Rows of the left sides, and where in the output their products go.
#[derive(Clone, Copy)]
struct Place {
    first_row: usize,
    n_rows: usize,
    first_col: usize,
}

/// Most rows of a tile.
const MOST_ROWS: usize = 12;

/// Some rows times packed panels, on this thread. Rows to add begin where the output does, a stride apart.
fn block(terms: &[Term<'_>], onto: (Onto<'_>, usize), place: Place, out: &mut impl Output) {
    pulp::Arch::new().dispatch(Block { terms, onto, place, out });
}

struct Block<'a, O> {
    terms: &'a [Term<'a>],
    onto: (Onto<'a>, usize),
    place: Place,
    out: &'a mut O,
}

impl<O: Output> WithSimd for Block<'_, O> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Block { terms, onto, place, out } = self;
        let n_cols = terms[0].1.n_cols;
        let mut done = 0;
        // Tiles of as many rows as the registers hold, then of fewer; the rows of a tile meet all panels before the next.
        macro_rules! tiles {
            ($rows:literal, $vectors:literal) => {
                while place.n_rows - done >= $rows {
                    for p in 0..terms[0].1.n_panels() {
                        let width = PANEL.min(n_cols - p * PANEL);
                        tile::<S, O, $rows, $vectors>(simd, terms, (place, done), (p, width), onto, out);
                    }
                    done += $rows;
                }
            };
        }
        match (S::F32_LANES, n_cols <= S::F32_LANES) {
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
}

/// A tile of `ROWS` rows and one panel, `VECTORS` vectors of columns at a time.
#[inline(always)]
fn tile<S: Simd, O: Output, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    terms: &[Term<'_>],
    (place, at): (Place, usize),
    (p, width): (usize, usize),
    (onto, stride): (Onto<'_>, usize),
    out: &mut O,
) {
    let lanes = VECTORS * S::F32_LANES;
    for start in (0..width).step_by(lanes) {
        let sums = sums::<S, ROWS, VECTORS>(simd, terms, place.first_row + at, p, start / S::F32_LANES);
        // Through memory: sums that a later loop may index would live there during the products too.
        let mut tile = [[0.0_f32; PANEL]; ROWS];
        for i in 0..ROWS {
            let (row, _) = S::as_mut_simd_f32s(&mut tile[i]);
            row[..VECTORS].copy_from_slice(&sums[i]);
        }
        let n = lanes.min(width - start);
        let first = place.first_col + p * PANEL + start;
        for (i, sums) in tile.iter().enumerate() {
            let out = out.row(at + i, first..first + n);
            match onto {
                Onto::Zero => out.copy_from_slice(&sums[..n]),
                Onto::Itself => out.iter_mut().zip(sums).for_each(|(o, s)| *o += s),
                Onto::Rows(rows) => {
                    let rows = &rows[(at + i) * stride + first..][..n];
                    out.iter_mut().zip(sums).zip(rows).for_each(|((o, s), r)| *o = r + s);
                }
            }
        }
    }
}

/// The sums of a tile whose columns begin at a panel's vector `vector`.
#[inline(always)]
fn sums<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    terms: &[Term<'_>],
    first: usize,
    p: usize,
    vector: usize,
) -> [[S::f32s; VECTORS]; ROWS] {
    let mut sums = [[simd.splat_f32s(0.0); VECTORS]; ROWS];
    for &(a, b) in terms {
        let (panel, _) = S::as_simd_f32s(b.panel(p));
        let panel = panel.chunks_exact(PANEL / S::F32_LANES);
        // Where columns lie in one piece: from the first row of the tile on, and how far apart.
        let (columns, stride) = match a {
            Left::Lies(a) if a.col_stride == 1 => {
                let n = a.n_cols;
                // Not `array::from_fn`, which may stay a call and then hides that all rows are `n` long.
                let mut rows: [&[f32]; ROWS] = [&[]; ROWS];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = &a.data[(first + i) * a.row_stride..][..n];
                }
                for (k, b) in (0..n).zip(panel) {
                    let b = &b[vector..vector + VECTORS];
                    for i in 0..ROWS {
                        let x = simd.splat_f32s(rows[i][k]);
                        for j in 0..VECTORS {
                            sums[i][j] = simd.mul_add_f32s(x, b[j], sums[i][j]);
                        }
                    }
                }
                continue;
            }
            Left::Lies(a) => (&a.data[first..], a.col_stride),
            Left::Strips { values, n_cols, .. } => {
                (&values[first / MOST_ROWS * n_cols * MOST_ROWS + first % MOST_ROWS..], MOST_ROWS)
            }
        };
        for (a, b) in columns.chunks(stride).zip(panel) {
            let (a, b) = (&a[..ROWS], &b[vector..vector + VECTORS]);
            for i in 0..ROWS {
                let x = simd.splat_f32s(a[i]);
                for j in 0..VECTORS {
                    sums[i][j] = simd.mul_add_f32s(x, b[j], sums[i][j]);
                }
            }
        }
    }
    sums
}
