package inventory

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

// queries runs statements that begin with a comment naming their caller, so that the server's process list, slow log and
// performance schema say whose they are. Statements that need no answer of each other travel together: to a server that has the
// rows in memory, a round trip is most of a statement's time.
type queries struct {
	q interface {
		ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
		QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	}
	comment string
	conn    *sql.Conn // of a transaction
	begun   bool      // the transaction
}

func (s *Store) queries(caller string) *queries {
	return &queries{q: s.db, comment: commentFor(caller)}
}

func commentFor(caller string) string { return "/* flashsale " + caller + " */ " }

// text gives the statements as they are sent. A transaction begins with its first.
func (q *queries) text(statements ...string) string {
	begin := ""
	if q.conn != nil && !q.begun {
		begin = "START TRANSACTION;"
	}
	return begin + q.comment + strings.Join(statements, ";"+q.comment)
}

// sent notes that the transaction has begun, unless the driver says that nothing was sent.
func (q *queries) sent(err error) error {
	q.begun = q.begun || !errors.Is(err, driver.ErrBadConn)
	return err
}

func (q *queries) run(ctx context.Context, query string, args ...any) (sql.Result, error) {
	r, err := q.q.ExecContext(ctx, q.text(query), args...)
	return r, q.sent(err)
}

// row is a query of one row.
type row func(into ...any) error

// Scan runs it; without a row it is sql.ErrNoRows.
func (r row) Scan(into ...any) error { return r(into...) }

func (q *queries) row(ctx context.Context, query string, args ...any) row {
	return func(into ...any) error { return q.read(ctx, oneRow(into, query, args...)) }
}

// each calls f for every row.
func (q *queries) each(ctx context.Context, f func(rows *sql.Rows) error, query string, args ...any) error {
	return q.read(ctx, read{query: query, args: args, each: f})
}

// read is a query and what to do with its rows.
type read struct {
	query string
	args  []any
	each  func(rows *sql.Rows) error
	after func() error // may be nil; when all rows of this query were read
}

// oneRow is a query of one row; without one it is sql.ErrNoRows.
func oneRow(into []any, query string, args ...any) read {
	found := false
	return read{query: query, args: args,
		each: func(rows *sql.Rows) error {
			found = true
			return rows.Scan(into...)
		},
		after: func() error {
			if !found {
				return sql.ErrNoRows
			}
			return nil
		}}
}

// read runs queries, in one round trip.
func (q *queries) read(ctx context.Context, reads ...read) error {
	texts := make([]string, len(reads))
	var args []any
	for i, r := range reads {
		texts[i] = r.query
		args = append(args, r.args...)
	}
	rows, err := q.q.QueryContext(ctx, q.text(texts...), args...)
	if q.sent(err) != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	for i, r := range reads {
		if i > 0 && !rows.NextResultSet() {
			return cmp.Or(rows.Err(), fmt.Errorf("%d results instead of %d: %w", i, len(reads), mysql.ErrMalformPkt))
		}
		for rows.Next() {
			if err := r.each(rows); err != nil {
				return err
			}
		}
		if err := rows.Err(); err != nil {
			return err
		}
		if r.after != nil {
			if err := r.after(); err != nil {
				return err
			}
		}
	}
	return rows.Close()
}

// change is a statement, and how many rows it must change: any other number means that the rows contradict what was read
// under lock, and the transaction must not commit.
type change struct {
	query string
	args  []any
	rows  int // or anyRows
	doing string
	wrong error // for another number of rows; ErrCorrupt if nil
}

const anyRows = -1

func changing(rows int, doing, query string, args ...any) change {
	return change{query: query, args: args, rows: rows, doing: doing}
}

// change makes changes, in one round trip.
func (q *queries) change(ctx context.Context, changes ...change) error {
	texts := make([]string, len(changes))
	var args []driver.NamedValue
	for i, c := range changes {
		texts[i] = c.query
		for _, a := range c.args {
			v, err := driver.DefaultParameterConverter.ConvertValue(a)
			if err != nil {
				return fmt.Errorf("%s: %w", c.doing, err)
			}
			args = append(args, driver.NamedValue{Ordinal: len(args) + 1, Value: v})
		}
	}
	var affected []int64
	err := q.conn.Raw(func(conn any) error {
		r, err := conn.(driver.ExecerContext).ExecContext(ctx, q.text(texts...), args)
		if err == nil {
			affected = r.(mysql.Result).AllRowsAffected()
		}
		return err
	})
	if !q.begun && len(affected) > 0 {
		affected = affected[1:] // of START TRANSACTION
	}
	if q.sent(err) != nil {
		doing := make([]string, len(changes))
		for i, c := range changes {
			doing[i] = c.doing
		}
		return fmt.Errorf("%s: %w", strings.Join(doing, ", or "), err) // the server does not say which
	}
	if len(affected) != len(changes) {
		return fmt.Errorf("%d results instead of %d: %w", len(affected), len(changes), mysql.ErrMalformPkt)
	}
	for i, c := range changes {
		if c.rows == anyRows || affected[i] == int64(c.rows) {
			continue
		}
		if c.wrong != nil {
			return c.wrong
		}
		return fmt.Errorf("%s: %d rows instead of %d: %w", c.doing, affected[i], c.rows, ErrCorrupt)
	}
	return nil
}

// inTx runs f in one transaction. It rolls back when f fails; a failed COMMIT is reported as *CommitError, because its
// outcome is unknown.
func (s *Store) inTx(ctx context.Context, caller string, f func(tx *queries) error) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("beginning a transaction: %w", err)
	}
	tx := &queries{q: conn, comment: commentFor(caller), conn: conn}
	if s.onHold != nil {
		began := time.Now()
		defer func() { s.onHold(caller, time.Since(began)) }()
	}
	committing := false
	defer func() { // also when f panics
		if tx.begun && !committing {
			if _, err := conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK"); err != nil {
				_ = conn.Raw(func(any) error { return driver.ErrBadConn }) // not back into the pool; the server rolls back
			}
		}
		_ = conn.Close()
	}()
	if err := f(tx); err != nil || !tx.begun {
		return err
	}
	committing = true
	if _, err := conn.ExecContext(context.WithoutCancel(ctx), "COMMIT"); err != nil {
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
		return &CommitError{Err: err}
	}
	return nil
}
