package controllers

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"flashsale.dev/operator/reserver/inventory"
)

// Databases are the connection pools of the controller: one per distinct content of Secrets, shared by the sales that
// use it, closed when the last one has gone.
type Databases struct {
	mu    sync.Mutex
	pools map[[32]byte]*database
	users map[types.NamespacedName]user
}

type user struct {
	key  [32]byte
	read time.Time
}

// database is one pool, and whether its server has been found fit.
type database struct {
	*inventory.Store
	key   [32]byte
	setup sync.Mutex // one check at a time
	fit   atomic.Bool
	// warning of the last check, if any.
	warning atomic.Pointer[inventory.SetupError]
}

// fingerprint changes with the content of the Secret that a sale uses, and does not give it away.
func (db *database) fingerprint(sale types.UID) string {
	mac := hmac.New(sha256.New, []byte(sale))
	_, _ = mac.Write(db.key[:])
	return hex.EncodeToString(mac.Sum(nil)[:8])
}

// connsPerDatabase bounds the controller's connections to one database.
const connsPerDatabase = 8

// secretFreshFor is how long a Secret's content is used before it is read again.
const secretFreshFor = 10 * time.Second

// NewDatabases makes the pools.
func NewDatabases() *Databases {
	return &Databases{pools: map[[32]byte]*database{}, users: map[types.NamespacedName]user{}}
}

// Known gives the sale's pool if its Secret was read a moment ago and its server found fit.
func (d *Databases) Known(sale types.NamespacedName) *database {
	d.mu.Lock()
	defer d.mu.Unlock()
	u, ok := d.users[sale]
	if !ok || time.Since(u.read) > secretFreshFor {
		return nil
	}
	if db := d.pools[u.key]; db.fit.Load() {
		return db
	}
	return nil // the Secret may have been mended
}

// Use gives the pool for the content of the sale's Secret, and drops the one used before if it was another.
func (d *Databases) Use(sale types.NamespacedName, options inventory.Options) (*database, error) {
	key := sha256.Sum256(fmt.Appendf(nil, "%d:%s%s", len(options.DSN), options.DSN, options.CA))
	d.mu.Lock()
	defer d.mu.Unlock()
	pool := d.pools[key]
	if pool == nil {
		options.MaxConns = connsPerDatabase
		store, err := inventory.Open(options)
		if err != nil {
			d.release(sale)
			return nil, err
		}
		pool = &database{Store: store, key: key}
		d.pools[key] = pool
	}
	if before, ok := d.users[sale]; ok && before.key != key {
		d.release(sale)
	}
	d.users[sale] = user{key, time.Now()}
	return pool, nil
}

// Release says that the sale needs no database any more.
func (d *Databases) Release(sale types.NamespacedName) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.release(sale)
}

func (d *Databases) release(sale types.NamespacedName) {
	gone, ok := d.users[sale]
	if !ok {
		return
	}
	delete(d.users, sale)
	for _, u := range d.users {
		if u.key == gone.key {
			return
		}
	}
	if pool := d.pools[gone.key]; pool != nil {
		delete(d.pools, gone.key)
		_ = pool.Close() // transactions in flight keep their connection to their end
	}
}

// setUp checks the server and migrates the schema, once until something fails.
func (db *database) setUp(ctx context.Context) error {
	db.setup.Lock()
	defer db.setup.Unlock()
	if db.fit.Load() {
		return nil
	}
	warning, err := db.Setup(ctx)
	if err != nil {
		return err
	}
	db.warning.Store(warning)
	db.fit.Store(true)
	return nil
}

// doubt makes the next setUp check again.
func (db *database) doubt() { db.fit.Store(false) }
