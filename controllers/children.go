package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	appsac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
)

const (
	fieldOwner = client.FieldOwner("flashsale-manager")
	// reapplyAfter is how long an unchanged child is left alone; what somebody changed by hand is mended within it.
	reapplyAfter = 30 * time.Second
	// childRetry is how soon a child that failed is tried again.
	childRetry = 5 * time.Second

	apiPort, adminPort = 8080, 9090
	secretPath         = "/etc/flashsale/database"
	webhookPath        = "/etc/flashsale/webhook"
)

// ManagedLabel marks the controller's children; its cache holds no others.
var ManagedLabel = map[string]string{"app.kubernetes.io/managed-by": "flashsale"}

func reserverName(sale *sales.FlashSale) string { return sale.Name + "-reserver" }
func sweeperName(sale *sales.FlashSale) string  { return sale.Name + "-sweeper" }

// child is one object that a running sale needs.
type child struct {
	name  string
	empty func() client.Object
	want  runtime.ApplyConfiguration
}

func (c child) kind() string { return fmt.Sprintf("%T", c.empty())[len("*v1."):] }

func (s *scope) key(c child) string { return string(s.sale.UID) + "/" + c.kind() + "/" + c.name }

func (s *scope) children() []child {
	deployment := func() client.Object { return &appsv1.Deployment{} }
	service := func() client.Object { return &corev1.Service{} }
	return []child{
		{sweeperName(s.sale), deployment, s.sweeper()},
		{reserverName(s.sale), deployment, s.reserver()},
		{reserverName(s.sale), service, s.service()},
	}
}

// appliedChildren remembers what was applied when, by key.
type appliedChildren struct {
	mu   sync.Mutex
	last map[string]appliedChild
}

type appliedChild struct {
	want string
	at   time.Time
}

// fresh says whether this was applied a moment ago; if not, it counts as applied now.
func (a *appliedChildren) fresh(key, want string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last == nil {
		a.last = map[string]appliedChild{}
	}
	if l := a.last[key]; l.want == want && time.Since(l.at) < reapplyAfter {
		return true
	}
	a.last[key] = appliedChild{want, time.Now()}
	return false
}

func (a *appliedChildren) forget(key string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.last, key)
}

// applyChildren makes the children that are wanted, or takes them away. What the API server refuses, or somebody else
// owns, becomes a fault of the sale.
func (s *scope) applyChildren(ctx context.Context) {
	var failed error
	for _, c := range s.children() {
		if s.decision.Run || s.decision.Publish && c.name == sweeperName(s.sale) {
			failed = errors.Join(failed, s.apply(ctx, c))
		} else {
			failed = errors.Join(failed, s.remove(ctx, c))
		}
	}
	if failed == nil {
		return
	}
	log.FromContext(ctx).Info("could not bring the children about", "error", failed.Error())
	fault := &plan.Fault{Reason: sales.ReasonApplyFailed, Message: failed.Error()}
	var taken *nameTakenError
	switch {
	case errors.As(failed, &taken):
		fault.Reason, fault.Person = sales.ReasonNameConflict, true
	case apierrors.IsForbidden(failed), apierrors.IsInvalid(failed), apierrors.IsBadRequest(failed):
		fault.Person = true
	}
	s.seen.ChildFault = fault
	wake := s.decision.Wake
	s.decide()
	s.decision.Finish = false // the children go before the object
	if s.decision.Wake = wake; wake == 0 || wake > childRetry {
		s.decision.Wake = childRetry
	}
}

type nameTakenError struct{ kind, name string }

func (e *nameTakenError) Error() string {
	return fmt.Sprintf("%s %s exists and belongs to somebody else: rename it, or give the sale another name", e.kind, e.name)
}

func (s *scope) apply(ctx context.Context, c child) error {
	want, err := json.Marshal(c.want)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", c.name, err)
	}
	there := c.empty()
	kind, key := c.kind(), s.key(c)
	name := client.ObjectKey{Namespace: s.sale.Namespace, Name: c.name}
	err = s.Get(ctx, name, there)
	if apierrors.IsNotFound(err) {
		// The cache holds the controller's own objects only: is the name free?
		s.applied.forget(key)
		err = s.Direct.Get(ctx, name, there)
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("looking for %s %s: %w", kind, c.name, err)
	}
	if err == nil && !ours(there, s.sale) {
		return &nameTakenError{kind, c.name}
	}
	if err == nil && s.database == nil {
		return nil // the Secret cannot be read, so nobody knows its fingerprint: leave the pods as they are
	}
	if s.applied.fresh(key, string(want)) {
		return nil
	}
	if err := s.Apply(ctx, c.want, fieldOwner, client.ForceOwnership); err != nil {
		s.applied.forget(key)
		return fmt.Errorf("applying %s %s: %w", kind, c.name, err)
	}
	return nil
}

func (s *scope) remove(ctx context.Context, c child) error {
	there := c.empty()
	err := s.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: c.name}, there)
	if apierrors.IsNotFound(err) {
		s.applied.forget(s.key(c))
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for %s: %w", c.name, err)
	}
	if !ours(there, s.sale) || !there.GetDeletionTimestamp().IsZero() {
		return nil
	}
	uid := there.GetUID()
	if err := s.Delete(ctx, there, client.PropagationPolicy(metav1.DeletePropagationBackground), client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("removing %s: %w", c.name, err)
	}
	return nil
}

// Children carry the sale's UID in a label, and no owner reference: a foreground deletion of the object, which Argo CD
// uses, makes the garbage collector delete what the object owns at once, while live holds may still be paid. The finalizer
// takes the children away when they have drained.

// ours says that the object is the sale's own child.
func ours(o client.Object, sale *sales.FlashSale) bool {
	return o.GetLabels()[sales.LabelSaleUID] == string(sale.UID)
}

// saleOfChild names the sale of a child that changed.
func saleOfChild(_ context.Context, o client.Object) []reconcile.Request {
	name := o.GetLabels()["app.kubernetes.io/instance"]
	if name == "" || o.GetLabels()[sales.LabelSaleUID] == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: client.ObjectKey{Namespace: o.GetNamespace(), Name: name}}}
}

// selector finds the pods of this sale, and not those of an earlier one of the same name.
func (s *scope) selector(component string) map[string]string {
	return map[string]string{"app.kubernetes.io/name": "flashsale", "app.kubernetes.io/instance": s.sale.Name,
		"app.kubernetes.io/component": component, sales.LabelSaleUID: string(s.sale.UID)}
}

func (s *scope) labels(component string) map[string]string {
	labels := s.selector(component)
	maps.Copy(labels, ManagedLabel)
	return labels
}

func (s *scope) service() *corev1ac.ServiceApplyConfiguration {
	return corev1ac.Service(reserverName(s.sale), s.sale.Namespace).
		WithLabels(s.labels("reserver")).
		WithSpec(corev1ac.ServiceSpec().
			WithSelector(s.selector("reserver")).
			WithPorts(corev1ac.ServicePort().WithName("http").WithPort(80).WithTargetPort(intstr.FromString("http")).WithProtocol(corev1.ProtocolTCP)))
}

func (s *scope) reserver() *appsac.DeploymentApplyConfiguration {
	resources := s.sale.Spec.Reserver.Resources
	if resources == nil {
		resources = &corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
		}
	}
	container := s.container("serve", *resources).
		WithArgs("serve", fmt.Sprintf("--listen=:%d", apiPort), fmt.Sprintf("--admin=:%d", adminPort)).
		WithPorts(corev1ac.ContainerPort().WithName("http").WithContainerPort(apiPort).WithProtocol(corev1.ProtocolTCP))
	return s.deployment(reserverName(s.sale), "reserver", s.sale.Spec.Reserver.Replicas, container)
}

func (s *scope) sweeper() *appsac.DeploymentApplyConfiguration {
	container := s.container("sweep", corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi")},
		Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")},
	}).WithArgs("sweep", fmt.Sprintf("--admin=:%d", adminPort),
		"--interval="+s.sale.Spec.Sweep.Interval.Duration.String(), "--batch-size="+strconv.Itoa(int(s.sale.Spec.Sweep.BatchSize)))
	webhook := s.sale.Spec.Webhook
	if webhook == nil {
		return s.deployment(sweeperName(s.sale), "sweeper", 1, container)
	}
	container.WithArgs("--webhook-url="+webhook.URL, "--webhook-secret="+webhookPath+"/secret").
		WithVolumeMounts(corev1ac.VolumeMount().WithName("webhook").WithMountPath(webhookPath).WithReadOnly(true))
	deployment := s.deployment(sweeperName(s.sale), "sweeper", 1, container)
	// Optional: without the key no event goes out, but holds are swept.
	deployment.Spec.Template.Spec.WithVolumes(corev1ac.Volume().WithName("webhook").
		WithSecret(corev1ac.SecretVolumeSource().WithSecretName(webhook.SecretRef.Name).WithDefaultMode(0o440).WithOptional(true)))
	return deployment
}

// container is what both Deployments have in common. The database's credentials are mounted, never passed.
func (s *scope) container(name string, resources corev1.ResourceRequirements) *corev1ac.ContainerApplyConfiguration {
	image := s.sale.Spec.Reserver.Image
	if image == "" {
		image = s.Image
	}
	return corev1ac.Container().WithName(name).WithImage(image).WithImagePullPolicy(corev1.PullIfNotPresent).
		WithCommand("/reserver").
		WithEnv(corev1ac.EnvVar().WithName("FLASHSALE_SALE_ID").WithValue(string(s.sale.UID)),
			corev1ac.EnvVar().WithName("FLASHSALE_DATABASE").WithValue(secretPath)).
		WithPorts(corev1ac.ContainerPort().WithName("admin").WithContainerPort(adminPort).WithProtocol(corev1.ProtocolTCP)).
		WithReadinessProbe(probe("/readyz").WithPeriodSeconds(1).WithTimeoutSeconds(2)).
		WithLivenessProbe(probe("/healthz").WithPeriodSeconds(10).WithTimeoutSeconds(5).WithFailureThreshold(6)).
		WithResources(corev1ac.ResourceRequirements().WithRequests(resources.Requests).WithLimits(resources.Limits)).
		WithVolumeMounts(corev1ac.VolumeMount().WithName("database").WithMountPath(secretPath).WithReadOnly(true)).
		WithSecurityContext(corev1ac.SecurityContext().
			WithAllowPrivilegeEscalation(false).WithReadOnlyRootFilesystem(true).
			WithCapabilities(corev1ac.Capabilities().WithDrop("ALL")))
}

func probe(path string) *corev1ac.ProbeApplyConfiguration {
	return corev1ac.Probe().WithHTTPGet(corev1ac.HTTPGetAction().WithPath(path).WithPort(intstr.FromString("admin")))
}

func (s *scope) deployment(name, component string, replicas int32, container *corev1ac.ContainerApplyConfiguration) *appsac.DeploymentApplyConfiguration {
	template := corev1ac.PodTemplateSpec().WithLabels(s.labels(component))
	if s.database != nil {
		// Pods read the Secret when they start: a new content replaces them, one by one.
		template.WithAnnotations(map[string]string{"sales.flashsale.dev/database": s.database.fingerprint(s.sale.UID)})
	}
	return appsac.Deployment(name, s.sale.Namespace).
		WithLabels(s.labels(component)).
		WithSpec(appsac.DeploymentSpec().
			WithReplicas(replicas).
			WithRevisionHistoryLimit(2).
			WithSelector(metav1ac.LabelSelector().WithMatchLabels(s.selector(component))).
			WithStrategy(appsac.DeploymentStrategy().WithType(appsv1.RollingUpdateDeploymentStrategyType).
				WithRollingUpdate(appsac.RollingUpdateDeployment().WithMaxUnavailable(intstr.FromInt32(0)).WithMaxSurge(intstr.FromInt32(1)))).
			WithTemplate(template.
				WithSpec(corev1ac.PodSpec().
					WithContainers(container).
					WithAutomountServiceAccountToken(false).
					WithEnableServiceLinks(false).
					WithTerminationGracePeriodSeconds(30).
					WithSecurityContext(corev1ac.PodSecurityContext().
						WithRunAsNonRoot(true).WithRunAsUser(65532).WithRunAsGroup(65532).WithFSGroup(65532).
						WithSeccompProfile(corev1ac.SeccompProfile().WithType(corev1.SeccompProfileTypeRuntimeDefault))).
					WithVolumes(corev1ac.Volume().WithName("database").
						WithSecret(corev1ac.SecretVolumeSource().WithSecretName(s.sale.Spec.Database.SecretRef.Name).WithDefaultMode(0o440))))))
}
