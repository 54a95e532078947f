//! Numbers in memory as matrices, and how they are laid out for a product: the right side in panels of 32 columns, row after row,
//! so that the inner loop reads them in order; a left side whose columns lie in one piece in strips of as many rows as a tile has.

use burn_flex::FlexTensor;
use half::bf16;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::buffer::Buffer;

/// Columns of a panel.
pub(super) const PANEL: usize = 32;

/// Most rows of a tile.
pub(super) const MOST_ROWS: usize = 12;

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
    pub(super) data: &'a [T],
    pub(super) n_rows: usize,
    pub(super) n_cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
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
    pub(super) n_cols: usize,
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
    pub(super) fn panel(&self, p: usize) -> &'a [f32] {
        &self.values[p * self.n_rows * PANEL..][..self.n_rows * PANEL]
    }

    pub(super) fn n_panels(&self) -> usize {
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
    pub(super) fn n_rows(&self) -> usize {
        match self {
            Self::Lies(matrix) => matrix.n_rows,
            Self::Strips { n_rows, .. } => *n_rows,
        }
    }

    pub(super) fn n_cols(&self) -> usize {
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

    pub(super) fn dims(&self) -> (usize, usize) {
        match self {
            Self::F32(m) => (m.n_rows, m.n_cols),
            Self::Bf16(m) => (m.n_rows, m.n_cols),
        }
    }

    pub(super) fn pack(&self, first: usize, n: usize, out: &mut [f32]) {
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
