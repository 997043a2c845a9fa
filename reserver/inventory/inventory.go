// Package inventory is the claim: the SQL that moves units of a sale between available, held and sold in MySQL, and
// the audit that proves from the rows that none was lost or sold twice. docs/claim.md explains the tables and statements.
//
// All times are UTC and come from the database's clock, at microsecond precision. All methods are safe for concurrent
// use, from any number of processes.
package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// MaxQuantity is the most units one reservation can ask for.
const MaxQuantity = 1000

// MaxIDLength is the longest buyer or payment identifier, in bytes.
const MaxIDLength = 128

// Sale is what the reservation pods obey: the spec of a FlashSale as the manager wrote it last.
type Sale struct {
	ID          uuid.UUID // UID of the FlashSale object
	Name        string    // namespace/name, for people
	SKU         string
	Units       int64
	StartsAt    time.Time
	EndsAt      time.Time     // exclusive; zero means no end
	HoldTTL     time.Duration // how long a reservation unlocks checkout
	MaxPerBuyer int
	Suspended   bool
	Draining    bool  // the object is being deleted: no new holds
	Generation  int64 // metadata.generation of the spec
}

// Counts are units by state; Available + Held + Sold is the number of unit rows loaded.
type Counts struct {
	Available int64 `json:"available"`
	Held      int64 `json:"held"`
	Sold      int64 `json:"sold"`
}

// Snapshot is a sale at one instant of the database's clock.
type Snapshot struct {
	Sale
	Counts
	Now       time.Time // the instant
	Loaded    int64     // unit rows loaded
	LoadedAt  time.Time // when the last one was in; zero while loading
	ClosedAt  time.Time // zero until closed
	NextLapse time.Time // when the earliest live hold expires; zero without one
}

// Gate says whether holds may be granted at an instant, and if not, why.
type Gate int

// The states of the gate.
const (
	GateOpen      Gate = iota
	GateNotOpen        // before the start, or units are still loading
	GateSuspended      // spec.suspend
	GateClosed         // at or after the end, closed, or draining
)

// Gate judges the sale's window at the instant now.
func (s *Snapshot) Gate(now time.Time) Gate {
	switch {
	case !s.ClosedAt.IsZero(), s.Draining, !s.EndsAt.IsZero() && !now.Before(s.EndsAt):
		return GateClosed
	case s.LoadedAt.IsZero(), now.Before(s.StartsAt):
		return GateNotOpen
	case s.Suspended:
		return GateSuspended
	}
	return GateOpen
}

// OpenedAt is when the sale opened: its start, or the end of loading when that came later. Zero before.
func (s *Snapshot) OpenedAt() time.Time {
	opened := s.StartsAt
	if s.LoadedAt.After(opened) {
		opened = s.LoadedAt
	}
	if s.LoadedAt.IsZero() || s.Now.Before(opened) {
		return time.Time{}
	}
	return opened
}

// State of a reservation.
type State int

// The states of a reservation, as stored.
const (
	Held      State = 1
	Confirmed State = 2
	Released  State = 3
	Expired   State = 4
)

func (s State) String() string {
	return [...]string{"", "HELD", "CONFIRMED", "RELEASED", "EXPIRED"}[s]
}

// Reservation is a buyer's claim on units.
type Reservation struct {
	ID        uuid.UUID
	Buyer     string
	Quantity  int
	Units     []int64 // unit numbers; not filled by replays of a claim
	State     State
	GrantedAt time.Time
	ExpiresAt time.Time
	PaymentID string // of a confirmed one
}

// Store is the inventory in one MySQL schema.
type Store struct {
	db     *sql.DB
	audits *sql.DB // for statements that may take minutes
}

// DB gives the connection pool, for statistics and for tests.
func (s *Store) DB() *sql.DB { return s.db }

// Close closes the connections.
func (s *Store) Close() error { return errors.Join(s.db.Close(), s.audits.Close()) }

// Unit states, as stored.
const (
	unitFresh    = 0
	unitHeld     = 1
	unitSold     = 2
	unitReturned = 3
)

// inTx runs f in one transaction. It rolls back when f fails; a failed COMMIT is reported as *CommitError, because its
// outcome is unknown.
func (s *Store) inTx(ctx context.Context, f func(tx *sql.Tx) error) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("beginning a transaction: %w", err)
	}
	if err := f(tx); err != nil {
		_ = tx.Rollback() // the error that matters is err; a broken connection is rolled back by the server
		return err
	}
	if err := tx.Commit(); err != nil {
		return &CommitError{Err: err}
	}
	return nil
}

// placeholders gives "?,?,?" for n values.
func placeholders(n int) string { return strings.TrimSuffix(strings.Repeat("?,", n), ",") }

// rowPlaceholders gives n rows like row: "(?,?),(?,?)".
func rowPlaceholders(row string, n int) string {
	return strings.TrimSuffix(strings.Repeat(row+",", n), ",")
}

func joinUnits(units []int64) string {
	var b strings.Builder
	for i, u := range units {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(u, 10))
	}
	return b.String()
}

func splitUnits(s string) ([]int64, error) {
	fields := strings.Split(s, ",")
	units := make([]int64, len(fields))
	for i, f := range fields {
		u, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("reading unit numbers %q: %w", s, err)
		}
		units[i] = u
	}
	return units, nil
}

// id gives the stored form of an id.
func id(u uuid.UUID) []byte { return u[:] }

func nullTime(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UTC()
}
